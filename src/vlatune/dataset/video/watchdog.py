"""FFmpeg, watched from outside: a file may make it hang inside of one call, where nobody looks at a clock.

The call runs on a thread of its own, and whoever waits for it gives up after `decode_s` (limits.py) and a while more. What
hangs is left behind: it goes on to hang until the process ends, which does not wait for it.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from vlatune.bounded_queue import BoundedQueue
from vlatune.limits import TooMuchError, limit

GRACE_S = 10.0
"""What a call gets beyond the cap: between packets the decoder looks at the clock itself, and its message says more."""
ALIVE, ALIVE_S = object(), 1.0


def within_time[T](call: Callable[[], T], place: object) -> T:
    """What `call` returns or raises, if that happens in time. It may be left behind, so it must own what it changes.

    The thread is kept for the next call of this thread: 50 us a call, and a unit of work makes one for each camera.
    """
    most_s, caller, answers = limit("decode_s") + GRACE_S, _caller(), BoundedQueue(2)
    caller.jobs.put((call, answers))
    try:
        while (answer := answers.take(timeout_s=most_s)) is ALIVE:
            pass
    except BaseException as error:  # out of time, or Ctrl-C: the call is still at work
        _mine.caller = None
        if not isinstance(error, TimeoutError):
            raise
        raise TooMuchError(
            f"{place}: FFmpeg did not come back from it within {most_s:g} s; it is damaged, or made to do so: re-encode it, or leave its "
            f"episodes out; if the machine is that slow, set VLATUNE_MAX_DECODE_S={2 * limit('decode_s') or 60}"
        ) from None
    result, error = answer
    if error is not None:
        raise error
    return result


def still_alive() -> None:
    """Inside of such a call: its time begins anew."""
    if _mine.answers is not None and time.monotonic() - _mine.told_s >= ALIVE_S:
        _mine.told_s = time.monotonic()
        _mine.answers.put(ALIVE)


class Caller:
    """A thread that makes the calls it is given, one after the other; it ends when nobody has this any more."""

    def __init__(self) -> None:
        self.jobs, self.pid = BoundedQueue(1), os.getpid()
        threading.Thread(target=_make_calls, args=(self.jobs,), name="ffmpeg", daemon=True).start()
        weakref.finalize(self, self.jobs.stop).atexit = False


def _make_calls(jobs: BoundedQueue) -> None:
    while True:
        try:
            call, answers = jobs.take()
        except StopIteration:
            return
        _mine.answers = answers
        try:
            answers.put((call(), None))
        except BaseException as error:  # for the thread that waits
            answers.put((None, error))
        _mine.answers = call = answers = None  # what they hold is not to live until the next call


class Mine(threading.local):
    """What a thread has of its own: one that waits, the thread that makes its calls; that one, where its answers go."""

    caller: Caller | None = None
    answers: BoundedQueue | None = None
    told_s = 0.0


_mine = Mine()
_of_parent: list[Any] = []
"""Of the process that forked this one: their threads are not here, and their locks may stay locked."""


def _caller() -> Caller:
    if _mine.caller is not None and _mine.caller.pid != os.getpid():
        _of_parent.append(_mine.caller)
        _mine.caller = None
    _mine.caller = _mine.caller or Caller()
    return _mine.caller
