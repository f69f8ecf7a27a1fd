"""`vlatune train` as a process: started, followed through its run folder, and checked for leftovers."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import waiting

from benchmarks.processes import processes_in
from vlatune.checkpoint.store import list_checkpoints
from vlatune.ray_internals import TRAIN_WORKER_TITLE
from vlatune.run.sinks import read_jsonl

TIMEOUT_S = 400
MANY_STEPS = 100_000
"""More steps than a test waits for."""
FAILED = "worker group failed"
READER = "ray::_read_blocks"


@contextmanager
def started(
    run_dir: Path, *flags: str, environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start a run in a new session; processes that are left of it are killed afterwards."""
    command = [*prefix, sys.executable, "-m", "vlatune.cli", "train", f"--output_dir={run_dir}", *flags]
    run_dir.parent.mkdir(exist_ok=True)
    with (run_dir.parent / "output.txt").open("a") as output:
        env = os.environ | (environment or {})
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, text=True, start_new_session=True)
        try:
            yield process
        finally:
            for pid in processes_in(process.pid):
                with suppress(ProcessLookupError):  # ended meanwhile
                    os.kill(pid, signal.SIGKILL)
            process.wait(TIMEOUT_S)


def finish(run_dir: Path, flags: list[str], timeout_s: float = TIMEOUT_S) -> None:
    with started(run_dir, *flags) as process:
        assert exit_code(process, run_dir, timeout_s) == 0, output(run_dir)


def output(run_dir: Path) -> str:
    return (run_dir.parent / "output.txt").read_text()


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen[str], run_dir: Path, timeout_s: float = TIMEOUT_S
) -> None:
    """Wait until the condition is true; fail with the output if the process ends before, or after the timeout."""

    def is_reached() -> bool:
        reached = bool(condition())
        assert reached or process.poll() is None, f"exit code {process.poll()}; output: {output(run_dir)[-3000:]}"
        return reached

    waiting.wait_until(is_reached, timeout_s, lambda: output(run_dir)[-3000:])


def exit_code(process: subprocess.Popen[str], run_dir: Path, timeout_s: float = TIMEOUT_S) -> int:
    """Wait for the end of the process and of all that it has started."""
    waiting.wait_until(
        lambda: process.poll() is not None and not processes_in(process.pid),
        timeout_s,
        lambda: f"{processes_in(process.pid)} still run; {output(run_dir)[-3000:]}",
    )
    return process.returncode


def step_of(run_dir: Path) -> int:
    """Return the newest logged step; 0 before the first."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    complete = [line for line in lines if line.endswith("\n")]
    return json.loads(complete[-1])["optimizer_step"] if complete else 0


def saved_steps(run_dir: Path) -> list[int]:
    return [int(path.name) for path in list_checkpoints(run_dir)]


def validation_curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """Return optimizer step, loss and action error of every validation."""
    lines = read_jsonl(run_dir / "validation.jsonl")
    return [(line["optimizer_step"], line["val_loss"], line["val_action_error"]) for line in lines]


def named(sid: int, part: str) -> list[int]:
    """Return the processes of a session whose command line contains `part`, oldest first."""
    return [pid for pid, title in processes_in(sid).items() if part in title]


def kill(process: subprocess.Popen[str], run_dir: Path, part: str, which: int = 0) -> None:
    """Kill one of the processes whose command line contains `part`, as soon as there is one."""

    def is_killed() -> bool:
        found = named(process.pid, part)
        try:
            os.kill(found[which % len(found)], signal.SIGKILL)
        except (ZeroDivisionError, ProcessLookupError):  # none, or it has just ended
            return False
        return True

    wait_until(is_killed, process, run_dir)


def kill_worker(process: subprocess.Popen[str], run_dir: Path) -> None:
    """Kill a training worker, and wait until the restarted group is some steps further."""
    failures = output(run_dir).count(FAILED)
    kill(process, run_dir, TRAIN_WORKER_TITLE)
    wait_until(lambda: output(run_dir).count(FAILED) > failures, process, run_dir)
    reached = step_of(run_dir)
    wait_until(lambda: step_of(run_dir) >= reached + 3, process, run_dir)


def leftover_folders() -> list[Path]:
    """Return the folders of clusters whose run is gone; a living run holds its folder's lock."""
    left = []
    for owner in Path(tempfile.gettempdir()).glob("vlatune-ray-*/owner"):
        with owner.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.append(owner.parent)
            except OSError:
                continue
    return left
