"""Being kept from computing, in words: by the process's own threads, by readers on the same cores, by other load.

Pure: a run's summary and settings in, words out. The figures are cpu_split.py's, which says what can be known from them.
"""

from typing import Any

from vlatune.report.summary import Summary
from vlatune.report.units import format_share

KEPT_SHARE_FINE = 0.05
"""Below this, having the cores to itself would save less than a twentieth of the time."""
IDLE_SHARE_FREE = 0.4
"""With two cores in five idle no other load can be the reason that threads queue."""


def kept_share(summary: Summary) -> float | None:
    """Share of the loop's time in which the training thread was kept from computing; None where that is not known."""
    cpu = _cpu(summary)
    if "kept_own_s" not in cpu or not cpu.get("loop_s"):
        return None
    return (cpu["kept_own_s"] + cpu["kept_others_s"]) / cpu["loop_s"]


def why_kept(summary: Summary, config: dict[str, Any]) -> str:
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
    """How fast the step runs of how fast it is alone; see cpu_split.py for what an accelerator's queue may hide."""
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
