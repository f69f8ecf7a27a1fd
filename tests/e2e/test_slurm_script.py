"""deploy/slurm.sh with programs that stand for SLURM, Ray and vlatune: a signal reaches vlatune, and the job is requeued."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from repository_files import ROOT
from waiting import wait_until

VLATUNE = """#!/bin/bash
trap 'echo saved >>"$LOG"; exit 143' TERM
echo "vlatune $*" >>"$LOG"
while :; do sleep 0.1; done
"""
LOGGED = """#!/bin/bash
echo "${0##*/} $*" >>"$LOG"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    scontrol = LOGGED + '[ "$1" = show ] && echo node1 && echo node2 || true\n'
    python = "#!/bin/bash\necho a-token\n"
    texts = {"srun": LOGGED, "ray": LOGGED, "scontrol": scontrol, "python": python, "vlatune": VLATUNE}
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_signal_saves(programs, tmp_path, number, requeued):
    log = tmp_path / "log"
    env = os.environ | {
        "LOG": str(log),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_GPUS_ON_NODE": "1",
    }
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"
    with subprocess.Popen(["bash", str(ROOT / "deploy" / "slurm.sh")], env=env) as job:
        wait_until(lambda: job.poll() is not None or (log.exists() and "vlatune train" in log.read_text()))
        assert job.poll() is None
        job.send_signal(number)
        assert job.wait(60) == 143
    lines = log.read_text().splitlines()
    starts = [line for line in lines if line.startswith("srun")]
    assert len(starts) == 2
    assert "--nodelist=node1 ray start --head" in starts[0]
    assert "--exclude=node1 ray start --address=" in starts[1]
    assert "saved" in lines
    assert ("scontrol requeue 17" in lines) == requeued
