"""A file in which FFmpeg hangs is abandoned with an error that names it."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vlatune.data.frames import watchdog
from vlatune.data.frames.decoder import decode_into
from vlatune.data.frames.watchdog import still_alive, within_time

VIDEO = "videos/observation.images.top/chunk-000/file-000.mp4"
PLACE = f"dataset 'x': episode 3, camera 'top', {VIDEO}"


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLATUNE_MAX_DECODE_S", "0")
    monkeypatch.setattr(watchdog, "GRACE_S", 0.3)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Ends the hanging thread after the test."""
    event = threading.Event()
    yield event
    event.set()


class HangingFile:
    """A file whose large reads, which only FFmpeg makes, do not return."""

    def __init__(self, path: Path, released: threading.Event) -> None:
        self._file, self._released = path.open("rb"), released

    def read(self, size: int = -1) -> bytes:
        if size >= 32 << 10:
            self._released.wait()
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@pytest.mark.usefixtures("short_limit")
def test_a_hanging_file_is_abandoned_and_the_next_one_is_read(dataset_v3, released, monkeypatch):
    out = np.empty((1, 3, 32, 32), np.uint8)
    with pytest.raises(ValueError, match=rf"episode 3, camera 'top', {VIDEO}: .*VLATUNE_MAX_DECODE_S="):
        decode_into(HangingFile(dataset_v3 / VIDEO, released), [0.5], out, PLACE, tolerance_s=1e-3)  # pyright: ignore[reportArgumentType]
    monkeypatch.delenv("VLATUNE_MAX_DECODE_S")
    decode_into(str(dataset_v3 / VIDEO), [0.5], out, PLACE, tolerance_s=1e-3)


@pytest.mark.usefixtures("short_limit")
def test_a_call_that_makes_progress_may_take_longer():
    turn = threading.Event()

    def call() -> str:
        for _ in range(12):
            turn.wait(0.05)
            still_alive()
        return "done"

    assert within_time(call, "x") == "done"


def test_a_process_exits_while_a_call_hangs():
    script = """
import threading
from vlatune.data.frames import watchdog
watchdog.GRACE_S = 0.1
try:
    watchdog.within_time(threading.Event().wait, "a.mp4")
except ValueError as error:
    print(error)
"""
    env = os.environ | {"VLATUNE_MAX_DECODE_S": "0", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("a.mp4: ")
