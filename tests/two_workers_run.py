"""A run of two workers by `vlatune train` on a local cluster, made once for several test files.

Rank 1 is stopped by a signal in the first epoch, and the group is restarted. All secrets of its environment are canaries, its only
network is a loopback interface where the system permits, and it ends with an error that quotes every secret (watched_run.py).
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from local_runs import Fault

from vlatune.config.settings import DatasetConfig, OptimizerConfig, PolicyConfig, RayConfig, RunConfig, to_json

TESTS = Path(__file__).parent
PROGRAM = TESTS / "e2e" / "watched_run.py"
FROM_ENVIRONMENT = "CANARY_VARIABLES"
"""Names of the variables that hold secrets, with commas."""
VARIABLES = {
    "AWS_SECRET_ACCESS_KEY": "canaryA7c4/Qz5k/W9xT2nB8aws",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdefcafe7c41",
    "HF_TOKEN": "hf_canaryA7c4Qz5kW9xT2nB8",
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=canaryA7c4azure==;",
    "DATABASE_PW": "canaryA7c4pw",
    "SERVICE_BEARER": "canaryA7c4bearer",
    "SERVICE_JWT": "canaryA7c4jwt",
    "TLS_PEM": "-----BEGIN PRIVATE KEY-----\ncanaryA7c4pem\n-----END PRIVATE KEY-----",
}
ALONE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""Before a command: it runs with a loopback interface and no other."""


@dataclass(frozen=True)
class TwoWorkersRun:
    config: RunConfig
    stopped: Fault
    printed: str
    seen: dict[str, list[str]]
    """Texts that others could see of the run: arguments, listening, cluster, files."""

    @property
    def folder(self) -> Path:
        return self.config.run_dir


def over_an_epoch(dataset: Path, base: Path) -> RunConfig:
    """Return a config of one worker that trains over the end of an epoch, whose last batch is filled up."""
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset),), eval_split=0.2, run_length=4, window_rows=8, drop_last=False),
        policy=PolicyConfig(path=str(base), train="full"),
        optimizer=OptimizerConfig(lr=1e-3),
        steps=12,
        batch_size=8,
        log_freq=1,
        save_freq=5,
        eval_freq=4,
        eval_samples=10,
        log_samples=True,
        max_restarts=0,
    )


def by_two(config: RunConfig) -> RunConfig:
    """Return the same global batches on two workers, with averaged weights and one checkpoint."""
    averaged = replace(config.optimizer, ema_decay=0.9)
    return replace(config, num_workers=2, batch_size=4, optimizer=averaged, save_every_s=0.0, keep_checkpoints=1)


def can_unshare() -> bool:
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def make_two_workers_run(dataset: Path, base: Path, folder: Path) -> TwoWorkersRun:
    config = replace(
        by_two(over_an_epoch(dataset, base)),
        output_dir=str(folder / "run"),
        ray=RayConfig(num_cpus=2),
        max_restarts=10,
        hang_timeout_s=15.0,
    )
    stopped = Fault("DistributedDataParallel", config.save_freq + 3, rank=1, signal=signal.SIGSTOP)
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    words = [sys.executable, str(PROGRAM), str(folder / "seen.json"), json.dumps(asdict(stopped))]
    words += [f"--config_path={folder / 'config.json'}"]
    paths = [str(TESTS), *sys.path]
    env = os.environ | VARIABLES | {FROM_ENVIRONMENT: ",".join(VARIABLES), "PYTHONPATH": ":".join(paths)}
    env.pop("VLATUNE_TRACEBACK", None)
    done = subprocess.run(
        [*ALONE, *words] if can_unshare() else words,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (folder / "seen.json").exists(), done.stderr[-3000:]
    return TwoWorkersRun(config, stopped, done.stdout + done.stderr, json.loads((folder / "seen.json").read_text()))
