"""The one queue between threads: items in order, the end, errors, time limits; and that no other kind is used."""

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlatune.bounded_queue import BoundedQueue, ReadAhead

SRC = Path(__file__).parents[1] / "src" / "vlatune"
OTHER_QUEUES = {"queue", "Queue", "SimpleQueue", "LifoQueue", "PriorityQueue", "Condition"}


def foreign_queues(tree: ast.AST) -> Iterator[str]:
    """Imports of `queue`, and what makes a queue or the condition that one could be made of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"line {node.lineno}: {one.name}" for one in node.names if one.name in OTHER_QUEUES)
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(one.name for one in node.names)]
            yield from (f"line {node.lineno}: {name}" for name in names if name in OTHER_QUEUES)
        elif isinstance(node, ast.Attribute) and node.attr in OTHER_QUEUES - {"queue"}:
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: path.relative_to(SRC).as_posix())
def test_no_module_has_a_queue_of_its_own(path: Path) -> None:
    if path.name == "bounded_queue.py":
        return
    found = list(foreign_queues(ast.parse(path.read_text(encoding="utf-8"))))
    assert not found, f"{path.name}: {', '.join(found)}: threads hand things over with vlatune.bounded_queue"


def test_other_queues_are_seen() -> None:
    code = "import queue\nfrom queue import SimpleQueue\nx = threading.Condition()\ny: asyncio.Queue\nz = deque()\n"
    assert len(list(foreign_queues(ast.parse(code)))) == 5


def test_items_then_the_end_at_every_call() -> None:
    queue = BoundedQueue(3)
    for number in range(3):
        assert queue.wait_for_room()
        queue.put(number)
    queue.end(None)
    assert [queue.take() for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(StopIteration):
            queue.take()


def test_nothing_in_time_is_a_timeout_and_a_later_item_is_still_taken() -> None:
    queue = BoundedQueue(1)
    for limit_s in (0.0, 0.01):
        with pytest.raises(TimeoutError, match=rf"nothing came in {limit_s:g} s"):
            queue.take(timeout_s=limit_s)
    queue.put("late")
    assert queue.take(timeout_s=0.0) == "late"
    queue.end(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        queue.take(timeout_s=0.0)


def test_a_giver_that_waits_for_room_is_let_go() -> None:
    queue, told = BoundedQueue(1), []
    queue.put(0)
    giver = threading.Thread(target=lambda: told.append(queue.wait_for_room()))
    giver.start()
    queue.stop()
    giver.join(timeout=10)
    assert told == [False]


def test_items_are_prepared_on_the_thread_when_there_is_room() -> None:
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
    assert len(prepared) == 1  # the second is taken, and waits for room as it is
    assert list(ahead) == ["0", "1", "2"]
    assert prepared == ["reads-ahead"] * 3
    ahead.close()
