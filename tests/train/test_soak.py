"""Ten minutes of chaos: every 20 to 40 s something of the run is killed; what comes out is the undisturbed run's."""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from driving import PATIENCE_S, left_behind, named, output, session, started, step_of
from test_driver import assert_same, finish, flags  # noqa: F401  (a fixture)

from vlatune.report.sinks import read_jsonl

pytestmark = pytest.mark.ray

CHAOS_S, GONE_S = 600, 150
PARTS = ("ray::RayTrainWorker", "ray::ReadLeRobot", "ray::", "raylet/raylet", "gcs/gcs_server", "vlatune.cli")
STEPS, SAVE_FREQ = 1500, 20


@dataclass(frozen=True)
class Kill:
    part: str
    step: int
    """The newest logged step when it was killed."""
    stepped: bool
    """Whether the run had made a step since the kill before."""


class Chaos:
    """Kills one process at a time, every 20 to 40 s; after one that came before a step, counted from the next step on:
    several in a row would test nothing but the start.
    """

    def __init__(self, run_dir: Path, chance: random.Random, until_s: float) -> None:
        self.kills: list[Kill] = []
        self._run_dir, self._chance, self._until_s = run_dir, chance, until_s

    def __call__(self, process: subprocess.Popen[str]) -> None:
        """Until the process or the chaos ends."""
        while self._goes_on(process):
            before = self._last_line()
            while self.kills and not self.kills[-1].stepped and self._goes_on(process) and self._last_line() == before:
                time.sleep(0.05)
            self._sleep(process, self._chance.uniform(20, 40))
            if self._goes_on(process):
                self._kill(process, stepped=self._last_line() != before)

    def _kill(self, process: subprocess.Popen[str], *, stepped: bool) -> None:
        part = self._chance.choice(PARTS)
        victims = named(process.pid, part)
        if victims:
            self.kills.append(Kill(part, step_of(self._run_dir), stepped))
            os.kill(self._chance.choice(victims), signal.SIGKILL)

    def _goes_on(self, process: subprocess.Popen[str]) -> bool:
        return process.poll() is None and time.monotonic() < self._until_s

    def _sleep(self, process: subprocess.Popen[str], seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while self._goes_on(process) and time.monotonic() < end_s:
            time.sleep(0.1)

    def _last_line(self) -> tuple[int, float]:
        """Changes with every step, also with one that is done again."""
        file = self._run_dir / "metrics.jsonl"
        return (file.stat().st_size, file.stat().st_mtime) if file.exists() else (0, 0.0)


@pytest.fixture
def traces(temporary) -> Iterator[None]:
    """Nothing more in shared memory and in the folder for temporary files than before, but torch's own cache."""
    before = list_traces()
    yield
    assert list_traces() - before == set()


def list_traces() -> set[Path]:
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    return {path for place in places for path in place.iterdir() if not path.name.startswith("torchinductor_")}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_minutes_of_chaos(flags, traces, tmp_path):  # noqa: F811
    longer = [*flags, f"--steps={STEPS}", f"--save_freq={SAVE_FREQ}", "--num_workers=2", "--max_restarts=1000"]
    clean, run_dir = tmp_path / "clean" / "run", tmp_path / "disturbed" / "run"
    for folder in (clean.parent, run_dir.parent):
        folder.mkdir()
    finish(clean, longer, 3 * PATIENCE_S)
    chaos, sessions = Chaos(run_dir, random.Random(20), time.monotonic() + CHAOS_S), []
    while not (run_dir / "summary.json").exists():
        with started(run_dir, *longer, reap=False) as process:
            sessions.append(process.pid)
            chaos(process)
            wait_for_end(process, run_dir)  # at once, or the chaos is over
        assert process.returncode in (0, -signal.SIGKILL), output(run_dir)[
            -3000:
        ]  # only a killed driver is started again
    said = output(run_dir)
    came_back = [line for line in said.splitlines() if "from " in line and "/checkpoints/" in line]
    (tmp_path / "kills.txt").write_text("\n".join(map(str, chaos.kills)))
    assert len(chaos.kills) >= 6
    assert sum(kill.stepped for kill in chaos.kills) >= 3
    assert len(came_back) >= 3  # or there was nothing to lose
    assert "Traceback" not in said
    assert [line["optimizer_step"] for line in read_jsonl(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert_same(run_dir, clean)
    wait_for_all_gone(sessions)
    assert left_behind() == []
    assert [path.name for path in (run_dir / "checkpoints").glob(".*")] == []


def wait_for_end(process: subprocess.Popen[str], run_dir: Path) -> None:
    deadline_s = time.monotonic() + 3 * PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < deadline_s, output(run_dir)[-3000:]
        time.sleep(0.5)


def wait_for_all_gone(sessions: list[int]) -> None:
    """What a killed driver has started must end by itself. Ray's agents try for a minute to tell their dead server."""
    deadline_s = time.monotonic() + GONE_S
    while there := [pid for sid in sessions for pid in session(sid)]:
        assert time.monotonic() < deadline_s, there
        time.sleep(0.5)
