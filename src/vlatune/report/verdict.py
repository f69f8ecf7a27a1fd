"""One honest line on a run, and one sentence on its evaluation.

Pure: a run's summary and settings in, words out. The line names what held the run back and what would help, worst
first: nothing learnt, bytes spilled, data waited for or cores shared, checkpoints waited for. It claims no more than was
measured: why the trainer waited for data only where the stages' seconds were recorded, compute-bound only where the step is
known to run at the speed that it has alone, and when a run was too short to tell.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlatune.report.formatting import format_bytes, format_seconds, format_share, plural, shorten
from vlatune.report.summary import Summary

WAIT_SHARE_FINE = 0.05
"""Below this, feeding the trainer faster would save less than a twentieth of the time."""
CHECKPOINT_SHARE_FINE = 0.05
"""The same reason."""
OTHER_THREADS_FINE = 0.5
"""Cores that other threads of the training process may take before it is said where nobody knows whom they kept."""
READERS_BUSY = 0.7
"""Readers that decode for this share of the time have hardly more to give: the rest is opening files and handing over."""
STAGE_BUSY = 0.5
"""One thread per worker collates, one stream copies: at this share they hold up what comes behind them."""
STEPS_TO_JUDGE = 20
"""The first steps allocate, compile and fill queues; a shorter run measures mostly those."""
USED_GROWTH = 0.10
"""An input counts as used when the error without it grows by a tenth: smaller differences appear between seeds."""
CONTENTION_FINE = 0.05
"""Below this, having the cores to itself would save less than a twentieth of the time."""
IDLE_SHARE_FREE = 0.4
"""With two cores in five idle no other load can be the reason that threads queue."""

Tone = Literal["good", "warn", "bad"]


@dataclass(frozen=True)
class Verdict:
    tone: Tone
    line: str


def verdict(summary: Summary, config: dict[str, Any]) -> str:
    """What held the run back, e.g. 'compute-bound: data wait 1.2 % of the time; 0 bytes spilled'."""
    return judge(summary, config).line


def judge(summary: Summary, config: dict[str, Any]) -> Verdict:
    """The verdict with its tone, for a page that colours it."""
    steps = summary.optimizer_steps
    if steps == 0:
        return Verdict("bad", "no optimizer step was taken; the reason is in logs/")
    found = _spilled(summary, config) or _held_up(summary, config) or _checkpointed(summary) or _computed(summary)
    return Verdict(found.tone, found.line + _caveats(steps, summary.restarts))


def interval_verdict(line: Mapping[str, Any]) -> str:
    """What held up the steps of one line of metrics.jsonl, in few words: data, own process, readers, other load, a limit."""
    spilled, wait, kept = (line.get(name) for name in ("spilled_bytes", "wait_share", "kept_share"))
    if spilled:
        return f"the object store: {format_bytes(spilled)} spilled"
    whom = str(line.get("kept_by") or "other load")
    if whom == "other load" and (line.get("idle_share") or 0.0) >= IDLE_SHARE_FREE:
        whom = "a limit"
    parts = [("data", wait or 0.0, WAIT_SHARE_FINE), (whom, kept or 0.0, CONTENTION_FINE)]
    worst = sorted((part for part in parts if part[1] >= part[2]), key=lambda part: -part[1])
    if worst:
        return ", ".join(f"{name} {format_share(share)}" for name, share, _ in worst)
    return "nothing, it computes" if kept is not None else "not by data; more is not known here"


def eval_meaning(evaluation: dict[str, Any]) -> str:
    """What the four errors say together: has it learnt to act, from the pictures, from the sentence?"""
    error, mean_error = evaluation["action_error"], evaluation["mean_action_error"]
    if error >= mean_error:
        return (
            "The model is no better than always predicting the mean action: "
            "it has not learnt yet to act from what it sees and is told."
        )
    parts = [
        f"The model's error is {format_share(1 - error / mean_error)} below that of always predicting the mean action."
    ]
    for key, what in (("blank_images_error", "the pictures"), ("blank_sentence_error", "the sentence")):
        if evaluation.get(key) is not None:
            parts.append(_use_of(what, evaluation[key], error))
    for camera, blank_error in (evaluation.get("blank_camera_errors") or {}).items():
        if blank_error < error * (1 + USED_GROWTH):
            parts.append(
                f"Without the camera {shorten(camera.split('.')[-1], 60)} alone it hardly changes, so here the others suffice."
            )
    return " ".join(parts)


def success_text(simulated: Mapping[str, Any]) -> str:
    """Of simulated episodes: a share of few, so with what it leaves open."""
    low, high = simulated["success_interval_95"]
    return (
        f"{format_share(simulated['success_rate'])} ({simulated['successes']} of {plural(simulated['episodes'], 'episode')}; 95 % "
        f"confidence: {format_share(low)} to {format_share(high)})"
    )


def looked_at(evaluation: Mapping[str, Any]) -> str:
    """Which episodes its figures are of."""
    root = evaluation.get("root")
    return f"episodes of {shorten(str(root), 200)}" if root else "held-out episodes"


def _spilled(summary: Summary, config: dict[str, Any]) -> Verdict | None:
    spilled, fallback = summary.spilled_bytes, summary.fallback_bytes
    store = summary.object_store_capacity_bytes or (config.get("ray") or {}).get("object_store_bytes")
    remedy = f"use --ray.object_store_bytes={2 * store}" if store else "raise --ray.object_store_bytes"
    if spilled:
        return Verdict(
            "bad", f"SPILLED {format_bytes(spilled)}: the object store was too small for the data in flight; {remedy}"
        )
    if fallback:
        return Verdict("bad", f"{format_bytes(fallback)} went to disk because shared memory was full; {remedy}")
    return None


def _held_up(summary: Summary, config: dict[str, Any]) -> Verdict | None:
    """Waiting for data, or being kept from computing: the larger share first, and the other too where it is not small."""
    share, waited = contention_share(summary) or 0.0, _waited(summary, config)
    kept = Verdict("warn", explain_contention(summary, config)) if share >= CONTENTION_FINE else None
    if waited is None or kept is None:
        return waited or kept
    first, second = (kept, waited) if share > summary.wait_share else (waited, kept)
    return Verdict("warn", f"{first.line}; besides, {second.line}")


def _waited(summary: Summary, config: dict[str, Any]) -> Verdict | None:
    share = summary.wait_share
    if share < WAIT_SHARE_FINE:
        return None
    return Verdict("warn", _why_waited(share, summary, config))


def _why_waited(share: float, summary: Summary, config: dict[str, Any]) -> str:
    num_workers, readers = config.get("num_workers", 1), summary.num_readers
    waited, fed = (
        f"the trainer waited {format_share(share)} of the time",
        "this worker" if num_workers == 1 else "the workers",
    )
    time_s = summary.time_s
    loop_s = time_s.get("total", 0.0) - time_s.get("start", 0.0)
    if not readers or not time_s.get("decode") or loop_s <= 0:
        return f"data-bound: {waited}; about {_readers_missing(share, readers)} would keep {fed} fed"
    samples = summary.samples_per_s * loop_s
    busy = readers_busy(time_s["decode"] / samples, samples / loop_s, readers) if samples else 0.0
    if busy >= READERS_BUSY:
        keep = f"{_readers_missing(share, readers)} would keep {fed} fed"
        return (
            f"decode-bound: {keep}; {waited}, {plural(readers, 'reader')} decoded {format_share(min(busy, 1.0))} of it"
        )
    stage = max(("transport", "collate", "copy"), key=lambda name: time_s.get(name, 0.0))
    stage_share = time_s.get(stage, 0.0) / (loop_s * num_workers)
    idle = f"readers decoded only {format_share(busy)} of it, so more of them would not help"
    if stage_share >= STAGE_BUSY:
        return f"{stage}-bound: {waited}, {stage} took {format_share(min(stage_share, 1.0))} of it; {idle}"
    return f"data-bound: {waited}; {idle}; a larger --ray.object_store_bytes lets more of them run at once"


def readers_busy(decode_s_per_sample: float, samples_per_s: float, num_readers: int) -> float:
    """Share of the time in which the readers decoded: 0.5 s a sample at 6 samples/s keeps 3 of 4 readers busy, 0.75."""
    return decode_s_per_sample * samples_per_s / num_readers


def missing_readers(wait_share: float, num_readers: int) -> int:
    """Starved, the trainer runs at the readers' rate r; unstarved at r / (1 - wait_share): so many more it needs."""
    factor = 1 / (1 - min(wait_share, 0.99))
    # The small term keeps 2 * 1.5 - 2 = 1.0000000000000002 from asking for two.
    return math.ceil(num_readers * (factor - 1) - 1e-6)


def _readers_missing(wait_share: float, num_readers: int | None) -> str:
    if num_readers is None:
        return f"{1 / (1 - min(wait_share, 0.99)):.1f} times as many CPU readers"
    return plural(missing_readers(wait_share, num_readers), "more CPU reader")


def _checkpointed(summary: Summary) -> Verdict | None:
    time_s = summary.time_s
    loop_s = time_s.get("total", 0.0) - time_s.get("start", 0.0)
    saving_s = time_s.get("checkpoint", 0.0)
    if loop_s <= 0 or saving_s / loop_s < CHECKPOINT_SHARE_FINE:
        return None
    share = format_share(saving_s / loop_s)
    return Verdict(
        "warn", f"checkpoint-bound: saving took {share} of the time ({format_seconds(saving_s)}); raise --save_freq"
    )


def _computed(summary: Summary) -> Verdict:
    waited, kept = f"data wait {format_share(summary.wait_share)} of the time", contention_share(summary)
    if kept is not None:
        return Verdict("good", f"compute-bound: {waited}, kept from computing {format_share(kept)}; 0 bytes spilled")
    cpu = summary.cpu or {}
    others_s, loop_s = cpu.get("other_threads_s"), cpu.get("loop_s")
    unknown = (
        "whether the step runs at the speed it has alone is not known: this system does not tell how long threads queue"
    )
    if others_s is not None and loop_s and others_s / loop_s >= OTHER_THREADS_FINE:
        took = f"other threads of the training process took {format_share(others_s / loop_s)} of a core"
        return Verdict("warn", f"{took}, and may have kept it from computing; {waited}; {unknown}")
    return Verdict("good", f"not held up by data: {waited}; 0 bytes spilled; {unknown}")


def _caveats(steps: int, restarts: int) -> str:
    text = f"; restarted {plural(restarts, 'time')}" if restarts else ""
    if steps < STEPS_TO_JUDGE:
        text += f" (a rough figure: only {plural(steps, 'step')})"
    return text


def _use_of(what: str, blank_error: float, error: float) -> str:
    growth = blank_error / error - 1 if error > 0 else math.inf
    if growth >= USED_GROWTH:
        times = f"{1 + growth:.1f} times" if math.isfinite(growth) else "many times"
        return f"Without {what} it is {times} as large, so the model uses {what}."
    change = "hardly changes" if abs(growth) < USED_GROWTH else "even shrinks"
    return f"Without {what} it {change}, so on these samples the model does not rely on {what}."


# CPU contention: kept from computing by the process's own threads, by readers on the same cores, by other load. The
# figures are cpu_clocks.py's, which says what can be known from them.


def contention_share(summary: Summary) -> float | None:
    """Share of the loop's time in which the training thread was kept from computing; None where that is not known."""
    cpu = _cpu(summary)
    if "kept_own_s" not in cpu or not cpu.get("loop_s"):
        return None
    return (cpu["kept_own_s"] + cpu["kept_others_s"]) / cpu["loop_s"]


def explain_contention(summary: Summary, config: dict[str, Any]) -> str:
    """Who kept it, how much that cost, and what to do; for a run whose share is known and not small."""
    words = {"own process": _by_itself, "readers": _by_readers}.get(summary.kept_by or "", _by_load)
    return words(summary, config)


def _by_itself(summary: Summary, config: dict[str, Any]) -> str:
    cpu = _cpu(summary)
    return (
        f"slowed by its own process: other threads of the training process took "
        f"{format_share(cpu['other_threads_s'] / cpu['loop_s'])} of a core; {_speed(summary)}; "
        f"`py-spy dump` of the worker names them: move their work to another process"
    )


def _by_readers(summary: Summary, config: dict[str, Any]) -> str:
    cpu, flags = _cpu(summary), summary.performance_flags
    threads = (
        int(flags.get("threads") or 1) if flags.get("device") == "cpu" else 1
    )  # an accelerator's worker only launches
    trainer_cores = threads * config.get("num_workers", 1)
    reader_cores = min(summary.time_s["decode"] / cpu["loop_s"], summary.num_readers or 1)
    return (
        f"sharing cores: readers and trainer want {trainer_cores + reader_cores:.1f} cores, there are {cpu['cores']}; "
        f"{_speed(summary)}; more cores, or readers on another machine, would give it the rest"
    )


def _by_load(summary: Summary, config: dict[str, Any]) -> str:
    others = "" if config.get("num_workers", 1) == 1 else ", perhaps this run's other workers"
    idle = _cpu(summary).get("idle_share", 0.0)
    if idle >= IDLE_SHARE_FREE:
        return (
            f"slowed by a limit: threads queued for cores while {format_share(idle)} of them were idle; {_speed(summary)}; "
            f"look for a CPU limit of the container, or for threads pinned to one core"
        )
    return (
        f"slowed by other load: processes beside this run's readers{others} took its cores; {_speed(summary)}; "
        f"stop them, or train on a machine of its own"
    )


def _speed(summary: Summary) -> str:
    """How fast the step runs of how fast it is alone; see cpu_clocks.py for what an accelerator's queue may hide."""
    cpu, time_s = _cpu(summary), summary.time_s
    kept_s = cpu["kept_own_s"] + cpu["kept_others_s"]
    compute_s = kept_s + time_s.get("compute", cpu["loop_s"] - kept_s)
    speed = format_share(max(0.0, 1 - kept_s / compute_s))
    if summary.performance_flags.get("device", "cpu") == "cpu":
        return f"the step runs at about {speed} of the speed it has alone"
    return f"the step is launched at about {speed} of the speed it has alone, which the device's queue may hide"


def _cpu(summary: Summary) -> dict[str, float]:
    """What the system has told."""
    return {name: value for name, value in (summary.cpu or {}).items() if value is not None}
