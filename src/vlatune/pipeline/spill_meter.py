"""The meter that watches the object stores for bytes that spill.

It reads the raylets' own counters; they only grow, so it keeps differences from its start. A meter that cannot measure
raises: a zero that was never measured is worse than an error.
"""

import threading
from dataclasses import dataclass

from vlatune.ray_internals import store_counters

SAMPLE_EVERY_S = 0.5


@dataclass(frozen=True)
class StoreCounters:
    spilled_bytes: int
    fallback_bytes: int
    used_bytes: int


def read_counters() -> StoreCounters:
    """Cluster-wide counters of the object stores, from the raylets."""
    try:
        return StoreCounters(*store_counters())
    except Exception as error:
        raise RuntimeError(
            f"the object store's counters cannot be read ({error}); without them a spill would go unseen"
        ) from error


class SpillMeter:
    """Samples the counters on a thread; `latest()` and `peak_bytes` are free to read."""

    def __init__(self) -> None:
        self._start = read_counters()
        self._latest = self._start
        self.peak_bytes = self._start.used_bytes
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spill-meter", daemon=True)
        self._thread.start()

    def latest(self) -> StoreCounters:
        """Spilled and fallback bytes since the meter's start, and bytes in use."""
        if self._failure is not None:
            raise RuntimeError(f"the spill meter stopped: {self._failure}")
        now, start = self._latest, self._start
        return StoreCounters(
            now.spilled_bytes - start.spilled_bytes, now.fallback_bytes - start.fallback_bytes, now.used_bytes
        )

    def close(self) -> StoreCounters:
        """A last exact reading."""
        self._stop.set()
        self._thread.join()
        self._sample()
        return self.latest()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            try:
                self._sample()
            except Exception as error:  # kept for the next reader; a thread must not die unseen
                self._failure = error
                return

    def _sample(self) -> None:
        self._latest = read_counters()
        self.peak_bytes = max(self.peak_bytes, self._latest.used_bytes)
