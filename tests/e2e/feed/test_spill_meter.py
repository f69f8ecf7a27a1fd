"""The spill meter on a real object store, and with given counters."""

import threading
import time

import numpy as np
import pytest
from waiting import wait_until

from vlatune.feed.memory import SpillMeter, StoreCounters, read_counters

MB = 1024 * 1024


def test_the_meter_counts_from_its_start_and_keeps_the_peak():
    last = StoreCounters(130, 17, 60)
    readings = iter([StoreCounters(100, 10, 50), StoreCounters(100, 10, 900)])
    all_read = threading.Event()

    def read() -> StoreCounters:
        counters = next(readings, last)
        if counters is last:
            all_read.set()
        return counters

    meter = SpillMeter(read)
    assert all_read.wait(60)
    assert meter.close() == meter.latest() == StoreCounters(spilled_bytes=30, fallback_bytes=7, used_bytes=60)
    assert meter.peak_bytes == 900


def test_the_meter_survives_a_gap_but_not_a_long_one():
    """A lost node makes the counters unreadable until Ray notices it."""
    counters, readable = StoreCounters(100, 10, 50), threading.Event()
    readable.set()
    attempts: list[bool] = []

    def read() -> StoreCounters:
        attempts.append(readable.is_set())
        if not readable.is_set():
            raise RuntimeError("no answer")
        return counters

    patient, impatient = SpillMeter(read), SpillMeter(read, max_gap_s=0.0)
    readable.clear()
    wait_until(lambda: impatient._failure)
    with pytest.raises(RuntimeError, match="no answer"):
        impatient.latest()
    wait_until(lambda: attempts.count(False) > 2)
    readable.set()
    assert patient.close() == StoreCounters(0, 0, 50)


def test_the_meter_counts_objects_and_no_spill(ray_local):
    """Blocks of earlier tests may be freed meanwhile, so the bytes in use grow by at most these objects."""
    import ray

    before_bytes = read_counters().used_bytes
    meter = SpillMeter(read_counters)
    kept = [ray.put(np.full(10 * MB, number, np.uint8)) for number in range(3)]
    after = meter.close()
    assert 30 * MB <= after.used_bytes <= before_bytes + 32 * MB
    assert meter.peak_bytes >= after.used_bytes
    assert (after.spilled_bytes, after.fallback_bytes) == (0, 0)
    assert all(ray.get(one)[0] == number for number, one in enumerate(kept))


def test_the_meter_counts_a_spill(ray_local):
    import ray

    before_bytes = read_counters().used_bytes
    meter = SpillMeter(read_counters)
    kept = [ray.put(np.zeros(70 * MB, np.uint8)) for _ in range(4)]  # 280 MB do not fit a store of 200 MB
    assert meter.close().spilled_bytes >= 70 * MB
    kept.clear()
    deadline_s = time.monotonic() + 60
    while read_counters().used_bytes > before_bytes + MB:  # later tests use the same store
        assert time.monotonic() < deadline_s
