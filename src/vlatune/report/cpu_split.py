"""How much of the loop's time that is called computing was computing, and who had the rest. Pure.

The training thread is on a core, ready without a core, or asleep. Ready without a core is lost, and the kernel counts it.
Asleep, beside what the loop's stopwatches know (data, checkpoints), is a wait for the interpreter's lock, a barrier, a peer
or the device: it is charged to the process's other threads up to the CPU seconds that they took, and no further: `kept`
rather says too little than too much. On an accelerator all this holds for the thread that launches; the device works off its
queue meanwhile and need not have noticed, so there `kept` is the most that was lost. Trials: docs/performance.md.
"""

import math
from collections.abc import Mapping
from typing import Literal

from vlatune.report.cpu_clocks import Reading, ThreadTimes

SPENT_CPU = (
    "loop",
    "train_thread",
    "compute_threads",
    "other_threads",
    "run_queue_wait",
    "kept_own",
    "kept_others",
    "idle_cpu",
    "all_cpu",
)
"""Seconds of a worker between two log steps; NaN where the system does not tell."""
HANDOVER_S = 20e-6
"""A thread that is woken, or hands its core to another of its team, queues this long: 15 and 17 us a run were seen where cores
were free, 50 to 3,000 us where they were contended."""
MOVERS_SHARE = 0.05
"""Of a core, taken by threads that move batches and hold the interpreter's lock only for moments: not charged."""
READERS_PART = 0.5
"""Readers are named as those who kept the trainer where they account for this part of what other processes took."""

Keeper = Literal["own process", "readers", "other load"]


def split(spent: Reading, wait_s: float, checkpoint_s: float) -> dict[str, float]:
    """SPENT_CPU of an interval: `spent` is the difference of two readings, the others are stopwatches of the loop."""
    compute_threads_s = spent.turn_takers.cpu_s + sum(one.cpu_s for one in spent.team)
    other_s = _at_least_zero(spent.process_s - spent.training.cpu_s - compute_threads_s)
    computing_s = _at_least_zero(spent.wall_s - wait_s - checkpoint_s)
    foreign_s = _at_least_zero(spent.all_cpu_s - spent.idle_cpu_s - spent.process_s)
    own_s, others_s = _kept(spent, computing_s, other_s, foreign_s)
    return {
        "loop": spent.wall_s,
        "train_thread": spent.training.cpu_s,
        "compute_threads": compute_threads_s,
        "other_threads": other_s,
        "run_queue_wait": spent.training.queued_s,
        "kept_own": own_s,
        "kept_others": others_s,
        "idle_cpu": spent.idle_cpu_s,
        "all_cpu": spent.all_cpu_s,
    }


def cpu_summary(spent: Mapping[str, float], num_cores: int) -> dict[str, float | None]:
    """What summary.json says under "cpu"."""
    named = {f"{name}_s": _known(spent[name]) for name in SPENT_CPU[1:7]}
    return named | {
        "loop_s": _known(spent["loop"]),
        "idle_share": _ratio(spent["idle_cpu"], spent["all_cpu"]),
        "cores": num_cores,
    }


def cpu_rates(spent: Mapping[str, float], decode_s: float, *, readers_here: bool) -> dict[str, float | str | None]:
    """What a line of metrics.jsonl says."""
    kept_s = spent["kept_own"] + spent["kept_others"]
    return {
        "other_threads_share": _ratio(spent["other_threads"], spent["loop"]),
        "kept_share": _ratio(kept_s, spent["loop"]),
        "kept_by": keeper(spent, decode_s, readers_here=readers_here),
        "idle_share": _ratio(spent["idle_cpu"], spent["all_cpu"]),
    }


def keeper(spent: Mapping[str, float], decode_s: float, *, readers_here: bool) -> Keeper | None:
    """Who kept the training thread most; None where that is not known, or nobody did.

    `decode_s` are the readers' seconds in the same stretch. They are a stopwatch's, so that readers who are kept from
    decoding count in full.
    """
    if not spent["kept_own"] + spent["kept_others"] > 0:
        return None
    if spent["kept_own"] >= spent["kept_others"]:
        return "own process"
    took_s = sum(spent[name] for name in ("train_thread", "compute_threads", "other_threads"))
    foreign_s = spent["all_cpu"] - spent["idle_cpu"] - took_s
    return "readers" if readers_here and decode_s >= READERS_PART * foreign_s else "other load"


def _kept(spent: Reading, computing_s: float, other_s: float, foreign_s: float) -> tuple[float, float]:
    """Seconds in which the step did not go on: through this process's other threads, through other processes.

    Threads of a team meet at barriers all the time, so the step goes on only while all of them run: the product of their
    shares. Their CPU seconds per step would say nothing, as whoever waits at a barrier burns CPU.
    """
    line, turns = spent.training, spent.turn_takers
    asleep_s = _at_least_zero(computing_s - line.cpu_s - line.queued_s - turns.cpu_s - turns.queued_s)
    if computing_s <= 0:
        return 0.0, 0.0
    charged_s = _at_least_zero(other_s - MOVERS_SHARE * computing_s)
    locked_s = min(asleep_s, charged_s) if math.isfinite(asleep_s + charged_s) else math.nan
    going_share = _share(computing_s - locked_s - _held_s(line) - _held_s(turns), computing_s)
    for one in spent.team:
        going_share *= _share(computing_s - _held_s(one), computing_s)
    queued_s = _at_least_zero(computing_s * (1 - going_share) - locked_s)
    took_s = other_s + foreign_s
    own_part = other_s / took_s if took_s else 0.0
    return locked_s + queued_s * own_part, queued_s * (1 - own_part)


def _held_s(times: ThreadTimes) -> float:
    """Seconds that a thread queued behind others, without what it would have queued alone."""
    return _at_least_zero(times.queued_s - times.runs * HANDOVER_S)


def _at_least_zero(seconds: float) -> float:
    """Clocks are read one after the other, and some lag by a tick. NaN stays NaN, which max() would hide."""
    return seconds if not seconds < 0 else 0.0


def _share(part_s: float, whole_s: float) -> float:
    return _at_least_zero(part_s) / whole_s


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds


def _ratio(part: float, whole: float) -> float | None:
    return None if math.isnan(part / whole if whole else math.nan) else part / whole
