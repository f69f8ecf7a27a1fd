"""The queue between threads: order, end, errors, time limits."""

import threading
from collections.abc import Iterator

import pytest

from vlatune.bounded_queue import BoundedQueue, ReadAhead


def test_after_the_last_item_every_take_raises_stop_iteration() -> None:
    queue = BoundedQueue(3)
    for number in range(3):
        assert queue.wait_for_space()
        queue.put(number)
    queue.end(None)
    assert [queue.take() for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            queue.take()


def test_a_timeout_does_not_lose_a_later_item() -> None:
    queue = BoundedQueue(1)
    for limit_s in (0.0, 0.01):
        with pytest.raises(TimeoutError, match=rf"no item within {limit_s:g} s"):
            queue.take(timeout_s=limit_s)
    queue.put("late")
    assert queue.take(timeout_s=0.0) == "late"
    queue.end(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        queue.take(timeout_s=0.0)


def test_stop_releases_a_waiting_producer() -> None:
    queue, results = BoundedQueue(1), []
    queue.put(0)
    producer = threading.Thread(target=lambda: results.append(queue.wait_for_space()))
    producer.start()
    queue.stop()
    producer.join(timeout=10)
    assert results == [False]


def test_items_are_prepared_on_the_thread_when_there_is_space() -> None:
    taken, prepared = threading.Semaphore(0), []

    def source() -> Iterator[int]:
        for number in range(3):
            taken.release()
            yield number

    def prepare(number: int) -> str:
        prepared.append(threading.current_thread().name)
        return str(number)

    ahead = ReadAhead(source(), depth=1, name="reads-ahead", prepare=prepare)
    for _ in range(2):
        assert taken.acquire(timeout=10)
    assert len(prepared) == 1  # the second waits for space, unprepared
    assert list(ahead) == ["0", "1", "2"]
    assert prepared == ["reads-ahead"] * 3
    ahead.close()
