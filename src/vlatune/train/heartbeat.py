"""[ray] The place where workers and driver hear of each other while Ray Train runs the workers.

Every worker tells it, once a second and from a thread of its own, how far it is; the answer is what the driver wishes.
A worker that is stopped falls silent; one that hangs tells the same number again and again. The lookout is an actor on
the driver's node that does nothing but remember, so it answers however busy the others are.
"""

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlatune.files import make_folder, open_to_append
from vlatune.train.stack_dump import answer_in, answer_no_more


class Wish(IntEnum):
    """The largest of all workers' wishes is carried out."""

    NOTHING = 0
    SAVE = 1
    STOP = 2
    """Save, then end."""


BEAT_S = 1.0
ANSWER_S = 10.0
Wished = tuple[int, Wish]
"""How often the driver has wished for something in this attempt, and what it was the last time."""
NO_WISH: Wished = (0, Wish.NOTHING)


@dataclass(frozen=True)
class RankState:
    """One worker, as the lookout knows it."""

    rank: int
    pid: int
    node_id: str
    moves: int
    """What it has done so far: micro-batches, updates, files of checkpoints. 0 while it is starting."""
    still_s: float
    """Since it last told of something new."""


class Lookout:
    """The actor. Only the current attempt's workers count."""

    def __init__(self) -> None:
        self._attempt, self._wished = -1, NO_WISH
        self._beats: dict[int, tuple[int, str, int]] = {}
        self._moved_s: dict[int, float] = {}

    def look(self, attempt: int, wished: Wished = NO_WISH) -> list[RankState]:
        """The workers of this attempt; those of another are forgotten. The driver says each time what it wishes, so that
        the actor itself may die and begin anew.
        """
        if attempt != self._attempt:
            self._attempt, self._beats, self._moved_s = attempt, {}, {}
        self._wished = wished
        now_s = time.monotonic()
        return [RankState(rank, *beat, now_s - self._moved_s[rank]) for rank, beat in sorted(self._beats.items())]

    def beat(self, attempt: int, rank: int, pid: int, node_id: str, moves: int) -> Wished:
        """What the driver wishes."""
        if attempt != self._attempt:
            return NO_WISH
        beat = (pid, node_id, moves)
        if self._beats.get(rank) != beat:
            self._moved_s[rank] = time.monotonic()
        self._beats[rank] = beat
        return self._wished

    def leave(self, attempt: int, rank: int) -> None:
        """A worker that has ended is not waited for."""
        if attempt == self._attempt:
            self._beats.pop(rank, None)


def start_lookout() -> Any:
    """An actor beside the driver, which takes no CPU from anyone; Ray starts it again when it dies."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Lookout).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()


def stacks_file(run_dir: Path, attempt: int, rank: int) -> Path:
    """Where a worker writes its stacks when it is asked, on its own node."""
    return run_dir / "logs" / f"stacks-{attempt}-rank-{rank}.txt"


def remove_empty_stacks(run_dir: Path) -> None:
    """Of workers that were killed before anyone asked them."""
    for file in (run_dir / "logs").glob("stacks-*.txt"):
        with contextlib.suppress(FileNotFoundError):  # its worker has just done the same
            if file.stat().st_size == 0:
                file.unlink()


class Heartbeat:
    """A worker's side: counts what it does, and tells it from a thread."""

    def __init__(self, lookout: Any, attempt: int, rank: int, run_dir: Path) -> None:
        self._wish, self._heard = Wish.NOTHING, 0
        self._lookout, self._attempt, self._rank = lookout, attempt, rank
        self._moves = 0
        self._ended = threading.Event()
        self._file = stacks_file(run_dir, attempt, rank)
        make_folder(run_dir, "logs")
        self._stacks = open_to_append(self._file)
        answer_in(self._stacks)
        self._thread = threading.Thread(target=self._tell, name="heartbeat", daemon=True)
        self._thread.start()

    def moved(self) -> None:
        """Something was done."""
        self._moves += 1

    def take_wish(self) -> Wish:
        """What the driver has wished for since the last call."""
        wish, self._wish = self._wish, Wish.NOTHING
        return wish

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        answer_no_more()
        self._stacks.close()
        with contextlib.suppress(FileNotFoundError):  # the driver has just done the same
            if self._file.stat().st_size == 0:
                self._file.unlink()

    def _tell(self) -> None:
        who = (self._attempt, self._rank, os.getpid(), ray.get_runtime_context().get_node_id())
        while True:
            with contextlib.suppress(RayError):  # busy or gone: the next beat, or nobody, will tell
                heard, wish = ray.get(self._lookout.beat.remote(*who, self._moves), timeout=ANSWER_S)
                if heard > self._heard:
                    self._heard, self._wish = heard, wish
            if self._ended.wait(BEAT_S):
                break
        self._lookout.leave.remote(self._attempt, self._rank)
