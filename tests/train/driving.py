"""`vlatune train` as a real process: started, watched through its run folder, and looked for afterwards."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vlatune.bench.processes import processes_in
from vlatune.report.sinks import read_jsonl

PATIENCE_S = 400


@contextmanager
def started(
    run_dir: Path, *flags: str, reap: bool = True, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own; whatever is left of it is gone afterwards, or may end by itself."""
    command = [sys.executable, "-m", "vlatune.cli", "train", f"--output_dir={run_dir}", *flags]
    with (run_dir.parent / "output.txt").open("a") as output:
        env = os.environ | (environment or {})
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, text=True, start_new_session=True)
        try:
            yield process
        finally:
            if reap:
                for pid in session(process.pid):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def output(run_dir: Path) -> str:
    return (run_dir.parent / "output.txt").read_text()


def until(
    what: Callable[[], object], process: subprocess.Popen[str], run_dir: Path, patience_s: float = PATIENCE_S
) -> None:
    """Wait for it; the process must go on meanwhile."""
    deadline_s = time.monotonic() + patience_s
    while not what():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise AssertionError(f"exit code {process.poll()}; it said: {output(run_dir)[-3000:]}")
        time.sleep(0.05)


def end_of(process: subprocess.Popen[str], run_dir: Path, patience_s: float = PATIENCE_S) -> int:
    """Its exit code; what it has started must be gone a moment later, without help."""
    deadline_s = time.monotonic() + patience_s
    while process.poll() is None or session(process.pid):
        assert time.monotonic() < deadline_s, f"{session(process.pid)} live on; it said: {output(run_dir)[-3000:]}"
        time.sleep(0.05)
    return process.returncode


def step_of(run_dir: Path) -> int:
    """The newest logged step; 0 before the first."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    return json.loads(whole[-1])["optimizer_step"] if whole else 0


def validation_curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """Optimizer step, loss and action error of every validation."""
    lines = read_jsonl(run_dir / "validation.jsonl")
    return [(line["optimizer_step"], line["val_loss"], line["val_action_error"]) for line in lines]


def session(sid: int) -> list[int]:
    """Processes of a session: all that a run has started, Ray's own included unless they left it."""
    return list(processes_in(sid))


def named(sid: int, part: str) -> list[int]:
    """Processes of the session whose command line has this in it, oldest first."""
    return [pid for pid, title in processes_in(sid).items() if part in title]


def left_behind() -> list[Path]:
    """Folders of clusters whose run is gone; a run that is alive holds its folder's lock."""
    left = []
    for owner in Path(tempfile.gettempdir()).glob("vlatune-ray-*/owner"):
        with owner.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.append(owner.parent)
            except OSError:
                continue
    return left
