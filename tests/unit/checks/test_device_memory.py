"""Estimates of device memory: sums of their parts, the largest batch, and the smallest change that fits."""

from dataclasses import replace

import pytest

from vlatune.checks.device_memory import (
    CUDA_BYTES,
    GB,
    MAX_BATCH,
    NCCL_BYTES,
    USABLE,
    Footprint,
    flags_that_fit,
)
from vlatune.config.settings import RunConfig
from vlatune.feed.feed import MIN_QUEUED, QUEUED_BYTES

HEADS = Footprint(weights=7 * GB, trained=10**7, saved=0, saved_per_sample=GB // 10, row_bytes=0)
FULL = Footprint(weights=13 * GB, trained=13 * GB, saved=4 * GB, saved_per_sample=5 * GB, row_bytes=0)
CHECKPOINTED = Footprint(weights=13 * GB, trained=13 * GB, saved=0, saved_per_sample=GB // 5, row_bytes=0)


def test_needed_memory_is_the_sum_of_its_parts():
    assert FULL.needed(2, ema=False) == (13 + 3 * 13 + 4 + 2 * 5) * GB + CUDA_BYTES
    assert FULL.needed(2, ema=True) - FULL.needed(2, ema=False) == 13 * GB
    assert FULL.needed(2, ema=False, cuda=False) == FULL.needed(2, ema=False) - CUDA_BYTES
    rows = Footprint(0, 0, 0, 0, row_bytes=QUEUED_BYTES)  # the feed queues the fewest batches of this size
    assert rows.needed(3, ema=False, cuda=False) == (3 + MIN_QUEUED) * 3 * QUEUED_BYTES


def test_several_workers_need_buffers():
    alone, exchanged = (FULL.needed(2, ema=False, num_workers=workers) for workers in (1, 2))
    assert exchanged - alone == NCCL_BYTES


def test_sharded_workers_hold_their_part_and_what_is_gathered():
    options = {"ema": False, "num_workers": 2, "fsdp": True}
    footprint = replace(CHECKPOINTED, gathered=6 * GB)
    held = (13 + 3 * 13) * GB // 2 + 6 * GB
    assert footprint.state_bytes(**options) == held
    assert footprint.needed(5, **options) == held + GB + CUDA_BYTES + NCCL_BYTES
    loaded = 13 * GB + CUDA_BYTES + NCCL_BYTES  # before a worker drops what others hold
    assert footprint.needed(5, **options | {"num_workers": 64}) == loaded


def test_several_workers_may_shard_what_does_not_fit():
    footprint, config = replace(FULL, gathered=6 * GB), RunConfig(batch_size=32, num_workers=2)
    shards = flags_that_fit(config, footprint, replace(CHECKPOINTED, gathered=6 * GB), 40 * GB)
    assert shards == ("--fsdp=true", "--policy.gradient_checkpointing=true", "--batch_size=16", "--grad_accum=2")
    assert flags_that_fit(config, FULL, CHECKPOINTED, 40 * GB) == ()
    assert flags_that_fit(replace(config, num_workers=1), footprint, footprint, 40 * GB) == ()


@pytest.mark.parametrize("footprint", [HEADS, FULL, CHECKPOINTED])
@pytest.mark.parametrize("size", [24, 80])
def test_the_largest_batch_fits_and_one_more_does_not(footprint, size):
    most = footprint.largest_batch(size * GB, ema=False)
    assert most == 0 or footprint.needed(most, ema=False) <= USABLE * size * GB
    assert most == MAX_BATCH or footprint.needed(most + 1, ema=False) > USABLE * size * GB


@pytest.mark.parametrize(
    ("footprint", "size", "flags"),
    [
        (HEADS, 12, ("--batch_size=16", "--grad_accum=4")),
        (FULL, 80, ("--batch_size=2", "--grad_accum=32")),
        (FULL, 64, ("--policy.gradient_checkpointing=true", "--batch_size=16", "--grad_accum=4")),
        (FULL, 24, ()),
    ],
)
def test_the_smallest_change_that_fits(footprint, size, flags):
    assert flags_that_fit(RunConfig(batch_size=32, grad_accum=2), footprint, CHECKPOINTED, size * GB) == flags
