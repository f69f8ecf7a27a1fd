"""The meter counts from its start, tells of its failures, and measures a real store."""

import threading

import numpy as np
import pytest

from vlatune.pipeline import memory
from vlatune.pipeline.memory import SpillMeter, StoreCounters, read_counters

MB = 1024 * 1024


@pytest.fixture
def readings(monkeypatch) -> list[StoreCounters | Exception]:
    """What the counters will say, one after the other, the last one for ever."""
    coming: list[StoreCounters | Exception] = []

    def read() -> StoreCounters:
        said = coming.pop(0) if len(coming) > 1 else coming[0]
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(memory, "read_counters", read)
    monkeypatch.setattr(memory, "SAMPLE_EVERY_S", 0.0)
    return coming


def test_a_meter_counts_from_its_start_and_keeps_the_peak(readings):
    readings += [StoreCounters(100, 10, 50), StoreCounters(100, 10, 900), StoreCounters(130, 17, 60)]
    meter = SpillMeter()
    while len(readings) > 1:  # the meter's thread takes them
        meter.latest()
    assert meter.close() == meter.latest() == StoreCounters(spilled_bytes=30, fallback_bytes=7, used_bytes=60)
    assert meter.peak_bytes == 900


def test_a_meter_whose_thread_failed_says_so(readings):
    readings += [StoreCounters(0, 0, 0), RuntimeError("raylet gone")]
    meter = SpillMeter()
    for thread in threading.enumerate():
        if thread.name == "spill-meter":
            thread.join()
    with pytest.raises(RuntimeError, match="the spill meter stopped: raylet gone"):
        meter.latest()
    with pytest.raises(RuntimeError, match="raylet gone"):
        meter.close()


# On a real store


def wait_until_empty() -> None:
    """Ray frees objects a moment after the last reference to them is gone."""
    while read_counters().used_bytes > MB:
        pass


def test_the_meter_sees_objects_come_and_nothing_spill(ray_local):
    import ray

    wait_until_empty()
    meter = SpillMeter()
    kept = [ray.put(np.full(10 * MB, number, np.uint8)) for number in range(3)]
    after = meter.close()
    assert 30 * MB <= after.used_bytes <= 32 * MB
    assert meter.peak_bytes >= after.used_bytes
    assert (after.spilled_bytes, after.fallback_bytes) == (0, 0)
    assert all(ray.get(one)[0] == number for number, one in enumerate(kept))


def test_the_meter_sees_a_spill(ray_local):
    """A zero is only worth something from a meter that shows more when there is more."""
    import ray

    meter = SpillMeter()
    kept = [ray.put(np.zeros(70 * MB, np.uint8)) for _ in range(4)]  # 280 MB do not fit a store of 200 MB
    assert meter.close().spilled_bytes >= 70 * MB
    kept.clear()
    wait_until_empty()  # the store is shared with other tests


def test_counters_that_cannot_be_read_are_an_error(ray_local, monkeypatch):
    from ray._private import internal_api

    def fail(_state):
        raise ConnectionError("raylet gone")

    monkeypatch.setattr(internal_api, "get_memory_info_reply", fail)
    with pytest.raises(RuntimeError, match=r"cannot be read \(raylet gone\); without them a spill would go unseen"):
        read_counters()
