"""Time limit for FFmpeg calls, which may hang inside a single packet of a damaged or malicious file.

The call runs on a daemon thread, and the caller gives up after `decode_s` (limits.py) plus a grace
period. A thread that hangs is abandoned; it does not block process exit.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from vlatune.storage.limits import TooMuchError, limit

GRACE_S = 10.0
"""Extra time, because the decoder's own timeout between packets has a better message."""
_thread = threading.local()


def within_time[T](call: Callable[[], T], place: object) -> T:
    """Return the result of `call` or raise on timeout; an abandoned call must own its state."""
    most_s = limit("decode_s") + GRACE_S
    signals: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def run() -> None:
        _thread.signals = signals
        try:
            signals.put(("result", call()))
        except BaseException as error:  # raised in the waiting thread
            signals.put(("error", error))

    threading.Thread(target=run, name="ffmpeg", daemon=True).start()
    while True:
        try:
            kind, value = signals.get(timeout=most_s)
        except queue.Empty:
            raise TooMuchError(
                f"{place}: FFmpeg did not return within {most_s:g} s; the file is damaged or malicious: re-encode it, or leave its "
                f"episodes out; on a very slow machine set VLATUNE_MAX_DECODE_S={2 * limit('decode_s') or 60}"
            ) from None
        if kind == "error":
            raise value
        if kind == "result":
            return value


def still_alive() -> None:
    """Restart the timeout, from inside a watched call."""
    if (signals := getattr(_thread, "signals", None)) is not None:
        signals.put(("alive", None))
