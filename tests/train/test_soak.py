"""Ten minutes of chaos: every 20 to 40 s something of the run is killed; what comes out is the undisturbed run's."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from driving import PATIENCE_S, left_behind, named, output, session, started, step_of
from test_driver import assert_same, clean, finish, flags  # noqa: F401  (fixtures)

CHAOS_S = 600
PARTS = ("ray::RayTrainWorker", "ray::ReadLeRobot", "ray::", "raylet/raylet", "vlatune.cli")


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_minutes_of_chaos(flags, clean, tmp_path):  # noqa: F811
    chance = random.Random(20)
    run_dir, before = tmp_path / "run", shared_memory()
    again = [*flags, "--max_restarts=1000", "--save_freq=20"]
    until_s, kills = time.monotonic() + CHAOS_S, []
    while time.monotonic() < until_s and not (run_dir / "summary.json").exists():
        with started(run_dir, *again) as process:
            while process.poll() is None and time.monotonic() < until_s:
                time.sleep(chance.uniform(20, 40))
                victims = named(process.pid, chance.choice(PARTS))
                if victims:
                    victim = chance.choice(victims)
                    kills.append((step_of(run_dir), victim == process.pid))
                    os.kill(victim, signal.SIGKILL)
            if process.poll() is None:  # the chaos is over; what runs may finish
                wait_for_end(process, run_dir)
    if not (run_dir / "summary.json").exists():
        finish(run_dir, again)
    assert len(kills) >= 5
    came_back = [line for line in output(run_dir).splitlines() if "from " in line and "/checkpoints/" in line]
    assert len(came_back) >= 3  # or all kills came before there was anything to lose
    assert_same(run_dir, clean)
    assert left_behind() == []
    assert shared_memory() <= before
    assert [path.name for path in (run_dir / "checkpoints").glob(".*")] == []


def wait_for_end(process, run_dir: Path) -> None:
    deadline_s = time.monotonic() + 2 * PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < deadline_s, output(run_dir)[-3000:]
        time.sleep(0.5)
    assert session(process.pid) == []
