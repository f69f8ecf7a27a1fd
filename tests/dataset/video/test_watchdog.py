"""FFmpeg is given up when it does not come back, whatever it hangs in, and the file is named; all else passes through."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest

from vlatune.dataset.health.video_health import frame_times
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video import watchdog
from vlatune.dataset.video.decoder import VideoPlace, close_decoders, decode_into
from vlatune.dataset.video.watchdog import still_alive, within_time
from vlatune.inspect.videos import read_video

VIDEO = "videos/observation.images.top/chunk-000/file-000.mp4"
PLACE = VideoPlace("x", 3, "top", VIDEO)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs does so for good: how soon it is given up decides nothing but the time of the test."""
    monkeypatch.setenv("VLATUNE_MAX_DECODE_S", "0")
    monkeypatch.setattr(watchdog, "GRACE_S", 0.3)


@pytest.fixture
def released() -> threading.Event:
    """What hangs in a test waits for it, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


class HangingFile:
    """A file object whose read does not return, as a store that is gone. FFmpeg, which reads 32 KiB at a time, is inside of
    its own call then; our look at the header reads less.
    """

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


@pytest.mark.usefixtures("impatient")
def test_a_read_that_hangs_in_ffmpegs_own_call_is_given_up(dataset_v3, released) -> None:
    file = HangingFile(dataset_v3 / VIDEO, released)
    out = np.empty((1, 3, 32, 32), np.uint8)
    with pytest.raises(
        ValueError, match=rf"episode 3, camera 'top', {VIDEO}: FFmpeg did not come back .*VLATUNE_MAX_DECODE_S="
    ):
        decode_into(file, [0.5], out, tolerance_s=1e-3, place=PLACE)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("where", ["decode", "seek", "open"])
@pytest.mark.usefixtures("impatient")
def test_whatever_hangs_is_given_up_and_the_next_file_is_read(dataset_v3, released, monkeypatch, where) -> None:
    """`decode` is a codec that spins, `seek` and `open` a container that does. One that comes back after all leaves nothing behind."""
    real_open, calls, ended = av.open, [], threading.Event()
    close_decoders()  # one that another test left open would not be opened again

    class Hanging:
        def __init__(self, inner: object, method: str) -> None:
            self._inner, self._method = inner, method

        def __getattr__(self, name: str) -> object:
            if name == self._method:
                return lambda *_, **__: released.wait()
            return getattr(self._inner, name)

    def opened(*words: object, **options: object) -> object:
        calls.append(words)
        if where == "open":
            released.wait()
        container = real_open(*words, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return Hanging(container, "demux" if where == "decode" else where)

    def telling(call: Callable[[], object], place: object) -> object:
        def told() -> object:
            try:
                return call()
            finally:
                ended.set()

        return within_time(told, place)

    out = np.empty((1, 3, 96, 96), np.uint8)
    with monkeypatch.context() as patched:
        patched.setattr("vlatune.dataset.video.recorded.av.open", opened)
        patched.setattr("vlatune.dataset.video.decoder.within_time", telling)
        with pytest.raises(ValueError, match="FFmpeg did not come back"):
            decode_into(str(dataset_v3 / VIDEO), [0.5], out, tolerance_s=1e-3, place=PLACE)
    assert len(calls) == 1
    monkeypatch.delenv("VLATUNE_MAX_DECODE_S")
    decode_into(str(dataset_v3 / VIDEO), [0.5], out, tolerance_s=1e-3, place=PLACE)
    close_decoders()
    released.set()
    assert ended.wait(60)
    decode_into(str(dataset_v3 / VIDEO), [0.2], out, tolerance_s=1e-3, place=PLACE)


@pytest.mark.usefixtures("impatient")
def test_inspect_and_the_check_of_episodes_name_the_file(dataset_v3, released, monkeypatch) -> None:
    monkeypatch.setattr("vlatune.dataset.video.recorded.av.open", lambda *_, **__: released.wait())
    root = Root(str(dataset_v3))
    assert read_video(root, VIDEO).error.startswith("FFmpeg did not come back from it within 0.3 s")
    with pytest.raises(ValueError, match=rf"{VIDEO}: FFmpeg did not come back"):
        frame_times(root, VIDEO, None, VIDEO)


@pytest.mark.usefixtures("impatient")
def test_what_tells_that_it_is_alive_may_take_longer(monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "ALIVE_S", 0.0)
    turn = threading.Event()

    def call() -> str:
        for _ in range(12):
            turn.wait(0.05)
            still_alive()
        return "done"

    assert within_time(call, "x") == "done"


def test_answers_errors_and_threads_pass_through() -> None:
    assert within_time(lambda: 3, "x") == 3
    with pytest.raises(KeyError, match="mine"):
        within_time(lambda: {}["mine"], "x")
    names = {within_time(threading.get_ident, "x") for _ in range(5)}
    assert len(names) == 1, "the thread is kept"
    assert names != {threading.get_ident()}
    still_alive()  # outside of a call it says nothing


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    within_time(lambda: 0, "x")
    pid = os.fork()
    if pid == 0:
        os._exit(within_time(lambda: 7, "x"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_process_ends_though_a_call_hangs() -> None:
    script = """
import threading
from vlatune.dataset.video import watchdog
watchdog.GRACE_S = 0.1
try:
    watchdog.within_time(threading.Event().wait, "a.mp4")
except ValueError as error:
    print(error)
"""
    env = os.environ | {"VLATUNE_MAX_DECODE_S": "0", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("a.mp4: FFmpeg did not come back")
