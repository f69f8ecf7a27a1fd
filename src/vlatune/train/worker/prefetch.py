"""Batches for the trainer, the next ones prepared on a thread while one computes.

The thread takes host columns from the feed, collates and stages them, waits for room, and sends them to the device; so
`depth` batches lie ready on the device and one more on the host. An error in the feed is raised where the batch would
have been taken, with its own traceback. After `close()`, at the end, or when nobody holds the prefetcher any more, no
thread is left.
"""

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from vlatune.batch import Columns
from vlatune.bounded_queue import BoundedQueue
from vlatune.train.worker.collate import DeviceBatch, HostBatch, collate


class Transfer(Protocol):
    """See transfer.py: what is staged and sent is its own business."""

    collate_s: float
    copy_s: float

    def enter_thread(self) -> None: ...
    def stage(self, batch: HostBatch, /) -> Any: ...
    def send(self, staged: Any, /) -> Any: ...
    def ask(self) -> Any: ...
    def receive(self, sent: Any, asked: Any, /) -> DeviceBatch: ...
    def take_waited_s(self) -> float: ...


class Prefetcher:
    """An iterator of batches on the device; for one consuming thread."""

    def __init__(self, source: Iterator[Columns], transfer: Transfer, *, depth: int) -> None:
        self._transfer = transfer
        self._ready = BoundedQueue(depth)
        self._is_first = True
        self._thread = threading.Thread(
            target=_prepare, args=(source, transfer, self._ready), name="prefetch", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._ready.stop)

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        # Before the first batch everything waits for the run to start: that is no wait of the loop.
        asked = None if self._is_first else self._transfer.ask()
        sent = self._ready.take()
        self._is_first = False
        return self._transfer.receive(sent, asked)

    def take_waited_s(self) -> float:
        """Seconds since the last call in which the trainer stood still for data; the first batch does not count."""
        return self._transfer.take_waited_s()

    def stage_s(self) -> dict[str, float]:
        """Seconds so far that collating and copying took, beside the loop."""
        return {"collate": self._transfer.collate_s, "copy": self._transfer.copy_s}

    def close(self) -> None:
        """At any moment. A source whose `next` can block must be closed first: the thread may be waiting in it."""
        self._ready.stop()
        self._thread.join()


def _prepare(source: Iterator[Columns], transfer: Transfer, ready: BoundedQueue) -> None:
    """The thread's whole life. It holds no reference to the prefetcher, so that one that is dropped can go."""
    try:
        transfer.enter_thread()
        for columns in source:
            staged = transfer.stage(collate(columns))
            if not ready.wait_for_room():
                return
            ready.put(transfer.send(staged))
        ready.end(None)
    except BaseException as error:  # raised where it is taken
        ready.end(error)
