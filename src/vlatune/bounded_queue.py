"""The one way from one thread to one other: a bounded queue that carries the end and errors along, and a thread that fills
one from an iterator. No Ray, no polling.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class BoundedQueue:
    """At most `depth` items from one thread to one other."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._changed = threading.Condition()
        self._items: deque[Any] = deque()
        self._is_over = False
        self._error: BaseException | None = None

    def wait_for_room(self) -> bool:
        """Whether there is any: none comes after `stop`. It stays, for there is one giver."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self._items) < self._depth)
            return not self._is_over

    def put(self, item: Any) -> None:
        with self._changed:
            if not self._is_over:
                self._items.append(item)
                self._changed.notify_all()

    def take(self, timeout_s: float | None = None) -> Any:
        """The next item; when there will be none, the giver's error or StopIteration, at every call.

        TimeoutError when neither comes in `timeout_s`, if that is given.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over or self._items, timeout_s):
                raise TimeoutError(f"nothing came in {timeout_s:g} s")
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def end(self, error: BaseException | None) -> None:
        """The giver's last word; what it gave before is still taken."""
        with self._changed:
            if not self._is_over:
                self._is_over, self._error = True, error
                self._changed.notify_all()

    def stop(self) -> None:
        """The taker's last word: items are dropped, the giver is let go."""
        with self._changed:
            self._is_over = True
            self._items.clear()
            self._changed.notify_all()


def as_it_is(item: Any) -> Any:
    return item


class ReadAhead:
    """An iterator's items, `depth` of them ready and one more taken, on a thread of its own; for one consuming thread.

    An error of the source is raised where its item would have been taken, with its own traceback, as often as it is
    asked for. After `close()`, at the end, or when nobody holds this object any more, no thread is left.
    """

    def __init__(
        self, source: Iterator[Any], *, depth: int, name: str, prepare: Callable[[Any], Any] = as_it_is
    ) -> None:
        """`prepare` is called on the thread, when there is room for what it makes."""
        self._ready = BoundedQueue(depth)
        self._thread = threading.Thread(target=_fill, args=(source, prepare, self._ready), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._ready.stop)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._ready.take()

    def close(self) -> None:
        """At any moment. A source whose `next` can block must be closed first: the thread may be waiting in it."""
        self._ready.stop()
        self._thread.join()


def _fill(source: Iterator[Any], prepare: Callable[[Any], Any], ready: BoundedQueue) -> None:
    """The thread's whole life. It holds no reference to the ReadAhead, so that one that is dropped can go."""
    try:
        for item in source:
            if not ready.wait_for_room():
                return
            ready.put(prepare(item))
        ready.end(None)
    except BaseException as error:  # raised where it is taken
        ready.end(error)
