"""[ray] Heartbeats: how workers and driver hear of each other while Ray Train runs the workers.

Every worker tells it, once a second and from a thread of its own, how far it is; the answer is what the driver asks for.
A worker that is stopped falls silent; one that hangs tells the same number again and again. The monitor is an actor on
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
from vlatune.train.failures import dump_stacks_no_more, dump_stacks_to


class Request(IntEnum):
    """What the driver or a worker would have all workers do; the largest of all requests is carried out."""

    NOTHING = 0
    SAVE = 1
    STOP = 2
    """Save, then end."""


BEAT_S = 1.0
ANSWER_S = 10.0
Requested = tuple[int, Request]
"""How often the driver has asked for something in this attempt, and what it was the last time."""
NO_REQUEST: Requested = (0, Request.NOTHING)


@dataclass(frozen=True)
class RankState:
    """One worker, as the monitor knows it."""

    rank: int
    pid: int
    node_id: str
    moves: int
    """What it has done so far: micro-batches, updates, files of checkpoints. 0 while it is starting."""
    still_s: float
    """Since it last told of something new."""


class HeartbeatMonitor:
    """The actor. Only the current attempt's workers count."""

    def __init__(self) -> None:
        self._attempt, self._requested = -1, NO_REQUEST
        self._beats: dict[int, tuple[int, str, int]] = {}
        self._moved_s: dict[int, float] = {}

    def look(self, attempt: int, requested: Requested = NO_REQUEST) -> list[RankState]:
        """The workers of this attempt; those of another are forgotten. The driver says each time what it asks for, so that
        the actor itself may die and begin anew.
        """
        if attempt != self._attempt:
            self._attempt, self._beats, self._moved_s = attempt, {}, {}
        self._requested = requested
        now_s = time.monotonic()
        return [RankState(rank, *beat, now_s - self._moved_s[rank]) for rank, beat in sorted(self._beats.items())]

    def beat(self, attempt: int, rank: int, pid: int, node_id: str, moves: int) -> Requested:
        """What the driver asks for."""
        if attempt != self._attempt:
            return NO_REQUEST
        beat = (pid, node_id, moves)
        if self._beats.get(rank) != beat:
            self._moved_s[rank] = time.monotonic()
        self._beats[rank] = beat
        return self._requested

    def leave(self, attempt: int, rank: int) -> None:
        """A worker that has ended is not waited for."""
        if attempt == self._attempt:
            self._beats.pop(rank, None)


def start_monitor() -> Any:
    """An actor beside the driver, which takes no CPU from anyone; Ray starts it again when it dies."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(HeartbeatMonitor).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()


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

    def __init__(self, monitor: Any, attempt: int, rank: int, run_dir: Path) -> None:
        self._request, self._heard = Request.NOTHING, 0
        self._monitor, self._attempt, self._rank = monitor, attempt, rank
        self._moves = 0
        self._ended = threading.Event()
        self._file = stacks_file(run_dir, attempt, rank)
        make_folder(run_dir, "logs")
        self._stacks = open_to_append(self._file)
        dump_stacks_to(self._stacks)
        self._thread = threading.Thread(target=self._tell, name="heartbeat", daemon=True)
        self._thread.start()

    def moved(self) -> None:
        """Something was done."""
        self._moves += 1

    def take_request(self) -> Request:
        """What the driver has asked for since the last call."""
        request, self._request = self._request, Request.NOTHING
        return request

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        dump_stacks_no_more()
        self._stacks.close()
        with contextlib.suppress(FileNotFoundError):  # the driver has just done the same
            if self._file.stat().st_size == 0:
                self._file.unlink()

    def _tell(self) -> None:
        who = (self._attempt, self._rank, os.getpid(), ray.get_runtime_context().get_node_id())
        while True:
            with contextlib.suppress(RayError):  # busy or gone: the next beat, or nobody, will tell
                heard, request = ray.get(self._monitor.beat.remote(*who, self._moves), timeout=ANSWER_S)
                if heard > self._heard:
                    self._heard, self._request = heard, request
            if self._ended.wait(BEAT_S):
                break
        self._monitor.leave.remote(self._attempt, self._rank)
