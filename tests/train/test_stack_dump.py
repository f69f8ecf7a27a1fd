"""Stacks of real processes that stand: busy, stopped, in C code with the interpreter's lock, gone."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vlatune.train.failures import dump_and_kill, process_state

PROGRAM = """
import ctypes, sys, threading, time
from vlatune.train.failures import dump_stacks_to

there = threading.Event()

def here_it_stands():
    print("ready", flush=True)
    {body}

def beside():
    there.set()
    threading.Event().wait()

file = open(sys.argv[1], "w")
dump_stacks_to(file)
threading.Thread(target=beside, daemon=True).start()
there.wait()
here_it_stands()
"""
BODIES = {
    "sleeping": "time.sleep(1000)",
    "busy": "while True: pass",
    "holding the lock in C": "while True: ctypes.PyDLL(None).sleep(1000)",
}


def start(body: str, file: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body), str(file)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("how", BODIES)
def test_a_process_that_stands_tells_where_and_is_gone(how, tmp_path):
    file = tmp_path / "stacks.txt"
    process = start(BODIES[how], file)
    text = dump_and_kill(process.pid, file)
    assert process.wait() == -signal.SIGKILL
    assert text.startswith("running\n")
    assert "here_it_stands" in text
    assert "beside" in text  # all threads


def test_a_stopped_process_tells_where_it_was_stopped(tmp_path):
    file = tmp_path / "stacks.txt"
    process = start(BODIES["busy"], file)
    process.send_signal(signal.SIGSTOP)
    while process_state(process.pid) != "stopped by a signal":
        pass
    text = dump_and_kill(process.pid, file)
    assert process.wait() == -signal.SIGKILL
    assert text.startswith("stopped by a signal\n")
    assert "here_it_stands" in text


def test_stacks_that_come_in_pieces_are_waited_for(tmp_path):
    file = tmp_path / "stacks.txt"
    slow = "file.write('one\\n'), file.flush(), time.sleep(0.3), file.write('two\\n'), file.flush()"
    body = f"import signal; signal.signal(signal.SIGUSR1, lambda *_: ({slow}))\n    print('set', flush=True)"
    body += "\n    while True: time.sleep(0.01)"  # Python's handler waits for the main thread, whichever thread the signal met
    process = start(body, file)
    assert process.stdout is not None
    assert process.stdout.readline() == "set\n"
    assert dump_and_kill(process.pid, file) == "running\none\ntwo\n"
    assert process.wait() == -signal.SIGKILL


def test_one_that_does_not_answer_is_ended_nevertheless(tmp_path):
    process = subprocess.Popen(["sleep", "1000"])
    assert dump_and_kill(process.pid, tmp_path / "none.txt", wait_s=0.1).endswith("it did not tell its stacks")
    assert process.wait() < 0


def test_a_process_that_is_gone_is_left_alone(tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    assert dump_and_kill(process.pid, tmp_path / "none.txt") == "gone"
