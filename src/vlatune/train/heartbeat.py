"""Heartbeats between workers and driver.

A thread of every worker reports its progress once a second (`worker/ray_worker.py`), and the
response contains the driver's request. A stopped worker stops reporting; a hanging worker reports no
progress. The monitor is an actor on the driver's node that only stores these reports, so it responds
even under load.
"""

import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path


class Request(IntEnum):
    """Action requested from all workers; the largest request applies."""

    NOTHING = 0
    SAVE = 1
    STOP = 2
    """Save a checkpoint, then stop."""


Requested = tuple[int, Request]
"""(number of requests in this attempt, latest request)."""
NO_REQUEST: Requested = (0, Request.NOTHING)


@dataclass(frozen=True)
class RankState:
    """State of one worker, as known to the monitor."""

    rank: int
    pid: int
    node_id: str
    events: int
    """Progress counter: micro-batches, log lines, checkpoint files. 0 during startup."""
    last_event: str
    idle_s: float
    """Seconds without progress."""
    silent_s: float = 0.0
    """Seconds without a heartbeat."""


class HeartbeatMonitor:
    """Actor that stores the heartbeats of the current attempt."""

    def __init__(self) -> None:
        self._attempt, self._requested = -1, NO_REQUEST
        self._beats: dict[int, tuple[int, str, int, str]] = {}
        self._changed_s: dict[int, float] = {}
        self._heard_s: dict[int, float] = {}

    def poll(self, attempt: int, requested: Requested = NO_REQUEST) -> list[RankState]:
        """Return the workers of this attempt, and set the driver's request.

        The driver repeats its request with every call, because the actor may be restarted.
        """
        if attempt != self._attempt:
            self._attempt, self._beats, self._changed_s = attempt, {}, {}
        self._requested = requested
        now_s = time.monotonic()
        return [
            RankState(rank, *beat, now_s - self._changed_s[rank], now_s - self._heard_s[rank])
            for rank, beat in sorted(self._beats.items())
        ]

    def beat(self, attempt: int, rank: int, pid: int, node_id: str, events: int, last_event: str) -> Requested:
        """Record the progress of a worker; return the driver's request."""
        if attempt != self._attempt:
            return NO_REQUEST
        beat, self._heard_s[rank] = (pid, node_id, events, last_event), time.monotonic()
        if self._beats.get(rank) != beat:
            self._changed_s[rank] = self._heard_s[rank]
        self._beats[rank] = beat
        return self._requested

    def leave(self, attempt: int, rank: int) -> None:
        """Remove a worker that has finished."""
        if attempt == self._attempt:
            self._beats.pop(rank, None)


def stacks_file(run_dir: Path, attempt: int, rank: int) -> Path:
    """Return the file on the worker's node for its stacks."""
    return run_dir / "logs" / f"stacks-{attempt}-rank-{rank}.txt"
