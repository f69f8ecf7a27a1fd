"""Heartbeats between workers and driver.

A thread of every worker reports its progress once a second (`worker/ray_worker.py`), and the
response contains the driver's request. A stopped worker stops reporting; a hanging worker reports no
progress. The monitor is an actor on the driver's node that only stores these reports, so it responds
even under load. Rank 0's heartbeats also carry the records of the run (`records.py`).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from vlatune.train.records import Mailbox, Parcel

WAIT_S = 1.0
"""Maximum time of a call that waits for the other side."""


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


class Reply(NamedTuple):
    """Response to a heartbeat."""

    requested: Requested
    wanted: int = 0
    """Number of the next record that the monitor does not have."""
    received: int = 0
    """Number of records that the driver has written."""


class HeartbeatMonitor:
    """Asynchronous actor that stores the heartbeats and records of the current attempt."""

    def __init__(self) -> None:
        self._attempt, self._requested = -1, NO_REQUEST
        self._beats: dict[int, tuple[int, str, int, str]] = {}
        self._changed_s: dict[int, float] = {}
        self._heard_s: dict[int, float] = {}
        self._mail = Mailbox()
        self._mail_changed = asyncio.Condition()

    async def poll(
        self,
        attempt: int,
        requested: Requested = NO_REQUEST,
        received: int = 0,
        acknowledged: int | None = None,
        *,
        wait_s: float = WAIT_S,
    ) -> tuple[list[RankState], Parcel]:
        """Return the workers of this attempt and the records after number `received`.

        Records before `acknowledged` (default: `received`) are dropped here and on rank 0. Waits for
        records if there are none. The driver repeats its request with every call, because the actor
        may be restarted.
        """
        acknowledged = received if acknowledged is None else acknowledged
        if attempt != self._attempt:
            self._attempt, self._beats, self._changed_s = attempt, {}, {}
            self._mail = Mailbox(acknowledged)
        self._requested = requested
        self._mail.acknowledge(acknowledged)
        await self._wait_for_mail(lambda: self._mail.end > received, wait_s)
        now_s = time.monotonic()
        states = [
            RankState(rank, *beat, now_s - self._changed_s[rank], now_s - self._heard_s[rank])
            for rank, beat in sorted(self._beats.items())
        ]
        return states, self._mail.parcel(received)

    async def beat(
        self,
        attempt: int,
        rank: int,
        pid: int,
        node_id: str,
        events: int,
        last_event: str,
        parcel: Parcel = (0, ()),
        awaited: int = 0,
    ) -> Reply:
        """Record the progress of a worker; return the driver's request.

        Waits until the driver has written the records before number `awaited`, if all are here.
        """
        if attempt != self._attempt:
            return Reply(NO_REQUEST)
        beat, self._heard_s[rank] = (pid, node_id, events, last_event), time.monotonic()
        if self._beats.get(rank) != beat:
            self._changed_s[rank] = self._heard_s[rank]
        self._beats[rank] = beat
        self._mail.put(parcel)
        mail = self._mail
        await self._wait_for_mail(lambda: not mail.begin < awaited <= mail.end, WAIT_S)
        return Reply(self._requested, mail.end, mail.begin) if attempt == self._attempt else Reply(NO_REQUEST)

    def leave(self, attempt: int, rank: int) -> None:
        """Remove a worker that has finished."""
        if attempt == self._attempt:
            self._beats.pop(rank, None)

    async def _wait_for_mail(self, is_ready: Callable[[], bool], wait_s: float) -> None:
        async with self._mail_changed:
            self._mail_changed.notify_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._mail_changed.wait_for(is_ready), wait_s)
