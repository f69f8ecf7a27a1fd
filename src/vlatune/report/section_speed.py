"""The report's sections on what the run cost: throughput, where the time went, the object store, starts and checkpoints."""

from vlatune.report import plots
from vlatune.report.formatting import Html, format_bytes, format_seconds, plural, tag
from vlatune.report.page import missing, section, shown_setting
from vlatune.report.run_folder import Checkpoints, Run


def spent_time(run: Run) -> Html:
    time_s = run.summary.time_s if run.summary else None
    speed = [plots.speed_charts(run.metrics)] if run.metrics else []
    bar = plots.time_bar(time_s) if time_s else missing("Not recorded: the run has not written its summary.")
    beside = [plots.stage_bars(time_s)] if time_s and any(time_s.get(stage) for stage in plots.STAGES) else []
    return section("Speed, and where the time went", *speed, bar, *beside)


def memory(run: Run) -> Html:
    spilled, fallback = run.figure("spilled_bytes"), run.figure("fallback_bytes")
    parts = []
    if spilled is not None:
        text = "Nothing was spilled to disk" if not spilled else f"{format_bytes(spilled)} were spilled to disk"
        if fallback is not None:
            text += f", and {format_bytes(fallback) if fallback else 'nothing'} had to be allocated there"
        parts.append(tag("p", text + "."))
    if plots.has(run.metrics, "object_store_bytes"):
        parts.append(plots.store_chart(run.metrics, run.capacity_bytes))
    return section("Object store against its limit", *(parts or [missing("Not recorded.")]))


def time_line(run: Run) -> Html:
    parts = [tag("p", f"{_starts(run)} {_kept_checkpoints(run.checkpoints)}")]
    if len(run.events) > 1:
        parts.append(plots.progress_chart(run.events))
    return section("Starts and checkpoints", *parts)


def _starts(run: Run) -> str:
    starts = [event for event in run.events if event["event"] == "start"]
    if len(starts) < 2:
        return "Started once." if starts else ""
    steps = ", ".join(f"{step:,.0f}" for step in run.restart_steps)
    lasted = format_seconds(max(0.0, run.events[-1]["time_s"] - run.events[0]["time_s"]))
    return f"Started {plural(len(starts), 'time')} in {lasted}; started again after optimizer step {steps}."


def _kept_checkpoints(kept: Checkpoints) -> str:
    place = f" in {shown_setting(kept.elsewhere)}" if kept.elsewhere else ""
    if kept.steps is None:
        return f"Checkpoints{place}: their place could not be asked when this page was written."
    return f"Checkpoints kept{place}, by optimizer step: {', '.join(f'{step:,}' for step in kept.steps) or 'none'}."
