"""A whole summary of a run, for tests that want another figure in it; what the class does not know cannot be in it."""

from dataclasses import replace
from typing import Any

from vlatune.report.summary import Summary

WHOLE = Summary(
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
    cpu={
        "train_thread_s": 97.0,
        "compute_threads_s": 95.0,
        "other_threads_s": 3.0,
        "run_queue_wait_s": 0.5,
        "kept_own_s": 0.5,
        "kept_others_s": 0.5,
        "loop_s": 100.0,
        "idle_share": 0.0,
        "cores": 2,
    },
    kept_by="own process",
    performance_flags={"device": "cpu", "threads": 2},
)


def summary(**changes: Any) -> Summary:
    return replace(WHOLE, **changes)
