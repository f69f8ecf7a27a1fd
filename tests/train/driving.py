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
from vlatune.policies.registry import get_policy
from vlatune.report.sinks import read_jsonl

PATIENCE_S = 400
ENDLESS = 100_000
POLICY_SAVE_FREQ = 10
OWN = {
    "pi0": ["--policy.flow_samples=2"],
    "smolvla": ["--policy.train=expert", "--policy.flow_samples=2"],
    "act": ["--policy.dropout=0.3", "--policy.optimizer_lr_backbone=0.0001", "--optimizer.ema_decay=0.9"],
    "diffusion": ["--policy.use_group_norm=false", "--policy.crop_ratio=0.8", "--optimizer.ema_decay=0.9"],
}
"""Policy -> what makes it lose something if it can."""
MOST_TO_LOSE = "diffusion"
"""History, crop, running statistics, averages."""


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


def flags_of(name: str, dataset: Path, *more: str) -> list[str]:
    """Of a policy's small twin, which the run makes itself; more steps than it could ever make."""
    return [
        f"--recipe={get_policy(name).small_recipe}",
        f"--dataset.root={dataset}",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        "--dataset.image_transforms.enable=true",
        "--batch_size=4",
        f"--steps={ENDLESS}",
        "--scheduler.type=constant_with_warmup",  # the rate does not depend on --steps
        "--scheduler.num_warmup_steps=4",
        "--log_freq=1",
        f"--save_freq={POLICY_SAVE_FREQ}",
        "--keep_checkpoints=2",  # a ResNet's are large
        "--save_every_s=0",
        "--eval_freq=0",
        "--log_samples=true",
        "--ray.num_cpus=2",
        "--ray.object_store_bytes=100000000",
        *OWN[name],
        *more,
    ]


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
