"""A bounded queue from one thread to one other that carries the end and errors along. No Ray, no polling."""

import threading
from collections import deque
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

    def take(self) -> Any:
        """The next item; when there will be none, the giver's error or StopIteration, at every call."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._items)
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
