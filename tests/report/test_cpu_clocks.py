"""The threads' clocks, against a made-up /proc and against the real one."""

import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from summaries import summary

from vlatune.report.cpu_clocks import CpuClocks, find_team, thread_cpu_s
from vlatune.report.verdict import verdict

STAT = """cpu  9 9 9 9 9 9 9 9 0 0
cpu0 1000 0 0 1000 0 0 0 0 0 0
cpu1 100 10 20 300 50 3 7 10 5 5
cpu3 200 0 0 300 0 0 0 0 0 0
intr 12345 0 9
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")


@pytest.fixture
def proc(tmp_path, monkeypatch) -> Path:
    """A /proc of a process that may use CPUs 1 and 3, with this thread and two of torch's."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 3}, raising=False)
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    monkeypatch.setattr("vlatune.report.cpu_clocks.thread_cpu_s", lambda thread: {7: 1.5, 8: 0.25}[thread])
    (tmp_path / "stat").write_text(STAT)
    for thread, name in ((threading.get_native_id(), "python"), (7, "python"), (8, "pt_autograd_0"), (9, "worker.io")):
        folder = tmp_path / f"self/task/{thread}"
        folder.mkdir(parents=True)
        (folder / "comm").write_text(name + "\n")
        (folder / "schedstat").write_text(f"123 {thread * 1_000_000_000} 40\n")
    return tmp_path


def test_a_reading_has_the_team_autograds_threads_and_the_usable_cpus(proc):
    clocks = CpuClocks([7], proc=proc)
    reading = clocks.read()
    assert clocks.num_cores == 2
    assert [(one.cpu_s, one.queued_s, one.runs) for one in reading.team] == [(1.5, 7.0, 40)]
    assert (reading.turn_takers.cpu_s, reading.turn_takers.queued_s) == (0.25, 8.0)
    assert reading.training.queued_s == threading.get_native_id()
    assert (reading.idle_cpu_s, reading.all_cpu_s) == (6.5, 10.0)  # idle and iowait; guests are in user already
    spent = clocks.read() - reading
    assert spent.wall_s > 0
    assert spent.team[0].queued_s == 0.0


@pytest.mark.parametrize("told", ["0 0 0\n", "", None], ids=["a kernel that does not count", "empty", "no file"])
def test_what_the_kernel_does_not_tell_is_not_zero(proc, told):
    file = proc / f"self/task/{threading.get_native_id()}/schedstat"
    file.unlink() if told is None else file.write_text(told)
    training = CpuClocks([7], proc=proc).read().training
    assert math.isnan(training.queued_s)
    assert training.cpu_s > 0


def test_without_proc_nothing_is_made_up(tmp_path):
    reading = CpuClocks(None, proc=tmp_path).read()
    unknown = (reading.team[0].cpu_s, reading.training.queued_s, reading.idle_cpu_s, reading.all_cpu_s)
    assert all(math.isnan(value) for value in unknown)
    assert reading.process_s > 0


@needs_proc
def test_a_team_that_does_not_work_is_not_found():
    assert find_team(lambda: None, 10_000) is None
    assert find_team(lambda: None, 0) == []


@needs_proc
def test_any_threads_cpu_time_can_be_read():
    assert thread_cpu_s(threading.get_native_id()) > 0
    with pytest.raises(OSError, match="Invalid argument"):
        thread_cpu_s(2**22 + 1)  # Linux numbers threads up to 2**22


WATCH = """
import hashlib, json, os, subprocess, sys, threading, time
from vlatune.report.cpu_clocks import CpuClocks
from vlatune.report.cpu_clocks import cpu_summary, keeper, split

def watch(work, enough):
    "Works until `enough` says so of what was spent."
    clocks = CpuClocks()
    before = clocks.read()
    while True:
        work()
        spent = split(clocks.read() - before, 0.0, 0.0)
        if enough(spent):
            break
    cpu = cpu_summary(spent, clocks.num_cores)
    print(json.dumps({"cpu": cpu, "kept_by": keeper(spent, 0.0, readers_here=False)}))
"""

HOG = """
def spin():
    while True:
        pass

def compute():
    for _ in range(20):
        hashlib.sha256(bytes(1 << 16)).digest()  # lets the lock go, as torch's operators do, and wants it back

threading.Thread(target=spin, daemon=True).start()
watch(compute, lambda spent: spent["other_threads"] > 0.5)
"""

SIBLING = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sibling = subprocess.Popen([sys.executable, "-c", "while True: pass"])

def compute():
    end_s = time.thread_time() + 0.05
    while time.thread_time() < end_s:
        pass

try:
    watch(compute, lambda spent: spent["run_queue_wait"] > 0.5)
finally:
    sibling.kill()
    sibling.wait()
"""


def watched(code: str) -> dict:
    program = WATCH + code
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def verdict_of(found: dict) -> str:
    flags = {"device": "cpu", "threads": 1}
    return verdict(summary(wait_share=0.0, time_s={}, performance_flags=flags, **found), {"num_workers": 1})


@needs_proc
def test_a_thread_that_holds_the_interpreters_lock_is_seen_and_named():
    """As Ray Data's executor did: the step waited for the lock, and data was never waited for."""
    found = watched(HOG)
    cpu = found["cpu"]
    assert cpu["other_threads_s"] > cpu["train_thread_s"]
    assert cpu["kept_own_s"] > 0
    assert not verdict_of(found).startswith("compute-bound")


@needs_proc
def test_a_busy_process_on_the_same_core_is_seen_and_named():
    found = watched(SIBLING)
    cpu = found["cpu"]
    assert cpu["cores"] == 1
    assert cpu["kept_others_s"] > cpu["kept_own_s"]
    assert found["kept_by"] == "other load"
    assert verdict_of(found).startswith("slowed by other load: ")
