"""A complete summary of a run, of which tests replace single values."""

from dataclasses import replace
from typing import Any

from vlatune.run.summary import Summary

SUMMARY = Summary(
    optimizer_steps=400,
    final_loss=0.0412,
    samples_per_s=31.2,
    wait_share=0.012,
    time_to_first_batch_s=4.8,
    spilled_bytes=0,
    fallback_bytes=0,
    peak_object_store_bytes=128_000_000,
    restarts=0,
    time_s={"start": 10.0, "wait": 1.2, "compute": 97.8, "checkpoint": 1.0, "total": 110.0},
    other_process_share=0.3,
    performance_flags={"device": "cpu", "threads": 2},
)


def summary(**changes: Any) -> Summary:
    return replace(SUMMARY, **changes)
