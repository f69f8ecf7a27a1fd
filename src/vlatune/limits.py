"""What a file of a stranger may ask for, looked up in its header before it is read: one table, each line a setting.

The defaults are far above what recordings, policies and runs have, and keep what one file can make us allocate below
about a GB. Whoever has a larger one sets the variable that the message names, `VLATUNE_MAX_PARQUET_ROWS=...`; with a
cluster of your own, on every node. `within_time` is for what no header tells: a library that does not come back.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

LIMITS = {
    "json_values": 8_000_000,  # lists, objects and what is in them; Gemma's tokenizer.json has 2.3 million
    "json_depth": 64,
    "line_bytes": 16 << 20,  # of a JSON-lines file; statistics of an episode have some 10 kB
    "parquet_footer_bytes": 64 << 20,
    "parquet_row_groups": 200_000,
    "parquet_rows": 20_000_000,  # of one file: 185 hours at 30 fps
    "parquet_values": 100_000_000,  # of one column of a row group
    "parquet_row_values": 4_000_000,  # of one column in one row: a depth picture has 300,000
    "parquet_unpacked_bytes": 64 << 20,  # of a column of a row group that unpacks to more than a hundred times its size
    "text_chars": 20_000,  # of a task's sentence
    "tasks": 1_000_000,
    "feature_values": 4_000_000,
    "picture_side": 16_384,
    "picture_pixels": 64_000_000,
    "episode_frames": 10_000_000,  # 92 hours at 30 fps
    "dataset_frames": 100_000_000,  # DROID has 27 million
    "video_frames": 5_000_000,  # of one mp4 file: 46 hours at 30 fps
    "video_streams": 16,
    "video_header_bytes": 256 << 20,
    "decode_s": 600,  # for the frames of one unit of work, some 32 of an episode; a second is usual
    "policy_number": 65_536,  # chunk_size, max_action_dim, a side of image_resolution and the like
    "model_depth": 512,
    "model_width": 1 << 20,
    "tokenizer_steps": 64,  # normalisers, pre-tokenisers and parts of a template
    "tokenizer_growth": 256,  # how many times longer normalisers may make a prompt
    "run_records": 5_000_000,  # lines of metrics.jsonl
    "run_array_bytes": 512 << 20,  # of one array in eval_samples.npz, unpacked
}
UNPACKED_SHARE = 100
"""How many times its size a large column may unpack to."""
GRACE_S = 10.0
"""What a call gets beyond its cap: where it looks at the clock itself, its own message comes first, and says more."""


class TooMuchError(ValueError):
    """A file that asks for more than its cap."""


def limit(name: str) -> int:
    """The cap of that name: the user's, or the default."""
    variable = _variable(name)
    text = os.environ.get(variable)
    if text is None:
        return LIMITS[name]
    if not text.isdecimal():
        raise ValueError(f"{variable}={text}: expected a whole number, as {LIMITS[name]}")
    return int(text)


def check_limit(name: str, found: float, what: str) -> None:
    """Refuse `found` above the cap; `what` names file and thing, as "info.json: the camera has sides of"."""
    most = limit(name)
    if found > most:
        raise TooMuchError(
            f"{what} {_shown(found)}, more than the {most:,} that are read; it is damaged or not what its name says; if it "
            f"is right, set {_variable(name)}={_shown(found).replace(',', '')}"
        )


def within_time[T](name: str, call: Callable[[], T], what: str) -> T:
    """What `call` returns. It may hang inside of a library, where no clock is looked at: then it is left behind and refused.

    It runs on a thread that is kept for the next call of this thread (40 us a call), so that it can be left: what hangs goes
    on to hang there until the process ends, which does not wait for it. So `call` must own what it changes.
    """
    most_s, thread = limit(name) + GRACE_S, _thread_of_mine()
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread.jobs.put((call, answers))
    try:
        while (answer := answers.get(timeout=most_s)) is ALIVE:
            pass
    except queue.Empty:
        _mine.thread = None
        raise TooMuchError(
            f"{what} did not come back within {most_s:g} s; the file is damaged, or made to do so: leave it out, or re-encode it; if "
            f"the machine is that slow, set {_variable(name)}={2 * limit(name) or 60}"
        ) from None
    except BaseException:  # Ctrl-C: the call is still at work there
        _mine.thread = None
        raise
    result, error = answer
    if error is not None:
        raise error
    return result


ALIVE = object()
ALIVE_S = 1.0


def still_alive() -> None:
    """Inside of such a call: its time begins anew."""
    if _mine.answers is not None and time.monotonic() - _mine.told_s >= ALIVE_S:
        _mine.told_s = time.monotonic()
        _mine.answers.put(ALIVE)


class _CallThread:
    """A thread that makes the calls that it is given, one after the other; it ends when nobody has this any more."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=_make_calls, args=(self.jobs,), name="within-time", daemon=True).start()

    def __del__(self) -> None:
        self.jobs.put(None)


def _make_calls(jobs: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        call, answers = job
        _mine.answers = answers
        try:
            answers.put((call(), None))
        except BaseException as error:  # for the thread that waits
            answers.put((None, error))
        _mine.answers = answers = job = call = None  # what they hold is not to live until the next call


class _Mine(threading.local):
    """What a thread has of its own: of one that waits the thread that makes its calls, of that one the call's answers."""

    thread: _CallThread | None = None
    pid = 0
    answers: queue.SimpleQueue[Any] | None = None
    told_s = 0.0


_mine = _Mine()


def _thread_of_mine() -> _CallThread:
    """A forked child has the object of its parent, and not the thread."""
    if _mine.thread is None or _mine.pid != os.getpid():
        _mine.thread, _mine.pid = _CallThread(), os.getpid()
    return _mine.thread


def _variable(name: str) -> str:
    return f"VLATUNE_MAX_{name.upper()}"


def _shown(found: Any) -> str:
    return f"{found:,}" if isinstance(found, int) and abs(found) < 10**18 else f"{str(found)[:30]}"
