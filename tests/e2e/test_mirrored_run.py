"""A run whose folder is mirrored to S3 is resumed, evaluated, exported and reported from other machines."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from driving import exit_code, output, started, wait_until
from local_runs import assert_same_run, train_flags
from unit.checkpoint.upload_server import environment, running_upload_server
from unit.storage.loopback_s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Fault, Proxy

from benchmarks.processes import processes_in
from vlatune.run.summary import read_summary
from vlatune.storage.lease import EXPIRY_S

pytestmark = pytest.mark.timeout(900)
STORAGE = f"s3://{BUCKET}/runs"
RUN = f"{STORAGE}/run"
STEPS = 600


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with running_upload_server() as proxy:
        yield proxy


class Machine:
    """A home and a working directory that no other machine sees."""

    def __init__(self, folder: Path, server: Proxy) -> None:
        self.folder = folder
        folder.mkdir()
        self.env = environment(server) | {name: str(folder / name) for name in ("HOME", "XDG_CACHE_HOME")}
        self.env["XDG_STATE_HOME"] = str(folder / "state")
        self.run_dir = folder / "runs/run"
        self.run_dir.parent.mkdir()

    def base(self, original: Path) -> Path:
        return shutil.copytree(original, self.folder / "base", dirs_exist_ok=True)

    def call(self, *words: str, code: int = 0) -> str:
        """Run a command; return what it printed."""
        command = [sys.executable, "-m", "vlatune.cli", *words]
        env = os.environ | self.env
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, check=False, timeout=400
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def machine(tmp_path, server) -> Iterator[Machine]:
    server.reset()
    yield Machine(tmp_path / "any", server)
    server.reset()


@pytest.fixture(scope="module")
def flags() -> list[str]:
    return ["--save_freq=100", "--save_every_s=0", "--eval_freq=50", "--eval_samples=4", "--log_samples=true"]


@pytest.fixture(scope="module")
def clean(dataset_v3, small_base, flags, tmp_path_factory) -> Path:
    """An uninterrupted run without storage."""
    run_dir = tmp_path_factory.mktemp("clean") / "run"
    with started(run_dir, *train_flags(dataset_v3, small_base, f"--steps={STEPS}", *flags)) as process:
        assert exit_code(process, run_dir) == 0, output(run_dir)
    return run_dir


@pytest.fixture(scope="module")
def resumed(dataset_v3, small_base, flags, server, tmp_path_factory) -> Machine:
    """A machine that has finished the run of another one, which was killed and is gone."""
    folder = tmp_path_factory.mktemp("machines")
    first, second = (Machine(folder / name, server) for name in ("first", "second"))

    def words(machine: Machine) -> list[str]:
        return train_flags(
            dataset_v3, machine.base(small_base), f"--steps={STEPS}", f"--storage_path={STORAGE}", *flags
        )

    fs = s3(server)
    with started(first.run_dir, *words(first), environment=first.env) as process:
        wait_until(lambda: fs.exists(f"{RUN}/checkpoints/00000100/manifest.json"), process, first.run_dir)
        for pid in processes_in(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(60)
    assert not fs.exists(f"{RUN}/summary.json")
    saved = int(max(fs.ls(f"{RUN}/checkpoints", detail=False)).rpartition("/")[2])
    mirrored = [json.loads(line) for line in fs.cat_file(f"{RUN}/metrics.jsonl").splitlines()]
    assert mirrored[saved - 1]["optimizer_step"] == saved, "a committed checkpoint has its metrics in the store"
    shutil.rmtree(first.folder)
    with started(second.run_dir, *words(second), environment=second.env) as process:
        assert exit_code(process, second.run_dir) == 0, output(second.run_dir)
    shutil.rmtree(second.folder / "base")
    return second


def s3(server: Proxy):
    options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": {"endpoint_url": server.url}}
    return fsspec.filesystem("s3", **options, use_listings_cache=False)


def test_run_resumed_on_another_machine_equals_an_uninterrupted_one(resumed, clean, server, tmp_path):
    assert f"restored from {RUN}" in output(resumed.run_dir)
    assert not list(resumed.run_dir.glob("checkpoints/*"))
    copy = Path(shutil.copytree(resumed.run_dir, tmp_path / "copy"))
    s3(server).get(f"{RUN}/checkpoints/", f"{copy}/checkpoints/", recursive=True)
    assert_same_run(copy, clean)
    events = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    starts = [one["optimizer_step"] for one in events if one["event"] == "start"]
    assert len(starts) == 2
    assert 0 == starts[0] < starts[1] < STEPS


def test_store_has_all_files_of_the_finished_run(resumed, server):
    fs = s3(server)
    names = [file.relative_to(resumed.run_dir).as_posix() for file in resumed.run_dir.rglob("*") if file.is_file()]
    mirrored = [name for name in names if not name.startswith((".", "logs/ray/"))]
    assert {"config.json", "metrics.jsonl", "summary.json", "report.html", "logs/worker.log"} < set(mirrored)
    assert any("tfevents" in name for name in mirrored)
    for name in mirrored:
        assert fs.cat_file(f"{RUN}/{name}") == (resumed.run_dir / name).read_bytes(), name


def test_run_is_evaluated_exported_and_reported_from_its_url(resumed, machine):
    rejected = machine.call("eval", RUN, code=2)
    assert "--dataset.root=" in rejected
    assert "--storage_path" not in rejected
    assert "--policy.path" not in rejected, "the base model comes from the storage"
    printed = machine.call("eval", RUN, "--trust_run=true", "--rollouts=1")
    assert "report: run-eval/eval.html" in printed
    figures = json.loads((machine.folder / "run-eval/eval.json").read_text())
    assert figures["checkpoint"] == f"{STEPS:08d}"
    machine.call("export", RUN, "exported")
    assert (machine.folder / "exported/model.safetensors").is_file()
    assert "run.html" in machine.call("report", RUN)
    summary = read_summary(resumed.run_dir)
    assert summary is not None
    assert f"{summary.optimizer_steps:,}" in (machine.folder / "run.html").read_text()
    machine.call("report", RUN, str(resumed.run_dir))
    assert (machine.folder / "comparison.html").is_file()
    assert not list(machine.folder.glob("run*/checkpoints"))


def test_second_driver_is_rejected_and_takes_over_an_expired_lease(
    clean, flags, dataset_v3, small_base, server, tmp_path
):
    server.reset()
    first, second = (Machine(tmp_path / name, server) for name in ("first", "second"))
    fs, run_dirs = s3(server), [one.run_dir.with_name("shared") for one in (first, second)]
    words = train_flags(dataset_v3, small_base, f"--steps={STEPS}", f"--storage_path={STORAGE}", *flags)
    with started(run_dirs[0], *words, environment=first.env) as process:
        wait_until(lambda: fs.exists(f"{STORAGE}/shared/lease.json"), process, run_dirs[0])
        rejected = second.call("train", f"--output_dir={run_dirs[1]}", *words, code=2)
        assert f"is in use by process {process.pid} on {socket.gethostname()}, started " in rejected
        assert not run_dirs[1].exists()
        wait_until(lambda: fs.exists(f"{STORAGE}/shared/checkpoints/00000100/manifest.json"), process, run_dirs[0])
        for pid in processes_in(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(60)
    lease = json.loads(fs.cat_file(f"{STORAGE}/shared/lease.json")) | {"machine": "another"}
    fs.pipe_file(f"{STORAGE}/shared/lease.json", json.dumps(lease | {"renewed_s": time.time()}).encode())
    assert "is in use by process" in second.call("train", f"--output_dir={run_dirs[1]}", *words, code=2)
    fs.pipe_file(f"{STORAGE}/shared/lease.json", json.dumps(lease | {"renewed_s": time.time() - EXPIRY_S}).encode())
    second.call("train", f"--output_dir={run_dirs[1]}", *words)
    fs.get(f"{STORAGE}/shared/checkpoints/", f"{run_dirs[1]}/checkpoints/", recursive=True)
    assert_same_run(run_dirs[1], clean)


@pytest.mark.parametrize("command", ["eval", "export", "report"])
def test_wrong_url_and_unavailable_store_are_reported_in_one_line(resumed, machine, server, command):
    target = ["out"] if command == "export" else []
    wrong = {
        f"{RUN}s": "is not a run folder",
        "s3://nowhere/runs/run": "is not a run folder",
        "s3://bucket": "s3://bucket/runs/NAME",
        f"s4://{BUCKET}/runs/run": "unknown scheme 's4'",
        f"s3://key:word@{BUCKET}/runs/run": "password",
    }
    for url, mention in wrong.items():
        (line,) = machine.call(command, url, *target, code=2).splitlines()
        assert mention in line
        assert "/tmp" not in line
    server.faults.append(Fault("403", times=-1))
    (line,) = machine.call(command, RUN, *target, code=1).splitlines()
    assert "access denied" in line


def test_store_that_is_away_for_a_while_does_not_end_the_run(dataset_v3, small_base, machine, server):
    """The run folder cannot be copied at first; the checkpoints can."""
    name = f"{STORAGE}/away"
    run_dir = machine.run_dir.with_name("away")
    server.faults.append(Fault("403", times=2, method="PUT", part="/away/data.json"))
    words = train_flags(dataset_v3, small_base, "--steps=20", "--save_freq=10", "--eval_freq=0")
    with started(run_dir, *words, f"--storage_path={STORAGE}", environment=machine.env) as process:
        assert exit_code(process, run_dir) == 0, output(run_dir)
    assert "run folder cannot be copied" in output(run_dir)
    assert not server.faults[0].times
    fs = s3(server)
    for file in ("config.json", "metrics.jsonl", "summary.json", "report.html"):
        assert fs.cat_file(f"{name}/{file}") == (run_dir / file).read_bytes()
