"""Batches for the trainer, the next ones prepared on a thread while one computes: the only thread between the object
store and the device.

It takes host columns from the feed, which puts them together in the memory that they are sent from, waits for room,
collates them and sends them to the device; so `depth` batches lie ready on the device and one more on the host.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from vlatune.batch import Columns
from vlatune.bounded_queue import ReadAhead
from vlatune.pipeline.reorder_buffer import Empty
from vlatune.train.worker.collate import DeviceBatch, HostBatch, collate


class Transfer(Protocol):
    """See transfer.py: what is staged and sent is its own business."""

    collate_s: float
    copy_s: float

    empty: Empty
    """Memory that batches are best put together in; for the thread that stages and sends."""

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
        self._is_first = True

        def send(columns: Columns) -> Any:
            return transfer.send(transfer.stage(collate(columns)))

        self._ahead = ReadAhead(_on_thread(source, transfer), depth=depth, name="prefetch", prepare=send)

    def __iter__(self) -> Iterator[DeviceBatch]:
        return self

    def __next__(self) -> DeviceBatch:
        # Before the first batch everything waits for the run to start: that is no wait of the loop.
        asked = None if self._is_first else self._transfer.ask()
        sent = next(self._ahead)
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
        self._ahead.close()


def _on_thread(source: Iterator[Columns], transfer: Transfer) -> Iterator[Columns]:
    """The source, on the thread that has taken its first item."""
    transfer.enter_thread()
    yield from source
