"""A bounded queue between two threads that propagates errors, and a prefetching iterator on top."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class BoundedQueue:
    """A queue of at most `depth` items from one producer to one consumer thread."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._changed = threading.Condition()
        self._items: deque[Any] = deque()
        self._is_over = False
        self._error: BaseException | None = None

    def wait_for_space(self) -> bool:
        """Wait until there is space for an item; False after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self._items) < self._depth)
            return not self._is_over

    def put(self, item: Any) -> None:
        with self._changed:
            if not self._is_over:
                self._items.append(item)
                self._changed.notify_all()

    def take(self, timeout_s: float | None = None) -> Any:
        """Return the next item; at the end, always raise the producer's error or StopIteration.

        Raises TimeoutError if nothing arrives within `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over or self._items, timeout_s):
                raise TimeoutError(f"no item within {timeout_s:g} s")
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def end(self, error: BaseException | None) -> None:
        """Finish producing, with an error if any; earlier items can still be taken."""
        with self._changed:
            if not self._is_over:
                self._is_over, self._error = True, error
                self._changed.notify_all()

    def stop(self) -> None:
        """Stop consuming: drop all items and release the producer."""
        with self._changed:
            self._is_over = True
            self._items.clear()
            self._changed.notify_all()


class ReadAhead:
    """Prefetch up to `depth` items of an iterator on a thread, for one consumer thread.

    An error of the source is raised at the position of its item, on every call, with its traceback.
    The thread ends after `close()`, at the end of the source, or when this object is garbage
    collected.
    """

    def __init__(
        self, source: Iterator[Any], *, depth: int, name: str, prepare: Callable[[Any], Any] = lambda item: item
    ) -> None:
        """Start prefetching; `prepare` runs on the thread once there is space for its result."""
        self._ready = BoundedQueue(depth)
        self._thread = threading.Thread(target=_fill, args=(source, prepare, self._ready), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._ready.stop)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._ready.take()

    def close(self) -> None:
        """Stop the thread. Close a source with a blocking `next` first: the thread may be waiting
        in it."""
        self._ready.stop()
        self._thread.join()


def _fill(source: Iterator[Any], prepare: Callable[[Any], Any], ready: BoundedQueue) -> None:
    """Fill the queue. Holds no reference to the ReadAhead, so that it can be garbage collected."""
    try:
        for item in source:
            if not ready.wait_for_space():
                return
            ready.put(prepare(item))
        ready.end(None)
    except BaseException as error:  # raised in the consumer
        ready.end(error)
