"""Render the report's sections on speed: throughput, time, object store, restarts."""

from collections.abc import Mapping

from vlatune.formatting import Html, format_bytes, format_seconds, format_share, join, plural, shorten, tag
from vlatune.report.chart import metric_chart
from vlatune.report.page import MAX_TEXT, missing, pair, section, shown_setting
from vlatune.run.run_folder import Checkpoints, Run
from vlatune.run.verdict import Verdict, judge, time_left_s

TIME_PARTS = {
    "start": "start-up, until the first batch",
    "compute": "computing",
    "wait": "waiting for data",
    "checkpoint": "saving checkpoints",
    "validation": "validation",
}


def run_verdict(run: Run) -> Verdict:
    """Return what limited the speed of a finished run, or the state of an unfinished one."""
    if run.summary:
        found = judge(run.summary, run.config)
        return Verdict(found.tone, run.summary.verdict or found.line)
    if not run.metrics:
        return Verdict("bad", "nothing was logged: the run has not reached its first log line, or failed; see logs/")
    left_s = time_left_s(run.metrics, run.config.get("steps"))
    left = f", about {format_seconds(left_s)} left" if left_s else ""
    steps = plural(run.figure("optimizer_steps"), "optimizer step")
    return Verdict("warn", f"not finished: {steps} logged{left}; if nothing more is logged, the run failed: see logs/")


def verdict_line(found: Verdict) -> Html:
    return tag("p", shorten(found.line, MAX_TEXT), class_=f"verdict {found.tone}")


def speed(run: Run) -> Html:
    """Render the speed verdict, throughput, where the time went, and the object store."""
    rate = metric_chart(run.metrics, "samples_per_s", "Samples per second")
    wait = metric_chart(run.metrics, "wait_share", "Share of the time waiting for data", unit="share", least_top=0.1)
    time_s = run.summary.time_s if run.summary else None
    bar = _time_bar(time_s) if time_s else missing("Not recorded: the run has not written its summary.")
    verdict = [verdict_line(run_verdict(run))] if run.summary else []
    time_part = tag("h3", "Where the time went"), bar
    return section("Speed", *verdict, pair(rate, wait), *time_part, tag("h3", "Object store"), *_object_store(run))


def _time_bar(time_s: Mapping[str, float]) -> Html:
    """Draw one bar split by activity, with a table as its legend."""
    parts = {name: max(0.0, time_s[name]) for name in TIME_PARTS if name in time_s}
    total_s = sum(parts.values()) or 1.0
    pieces, rows = [], []
    for name, seconds in parts.items():
        label, share = TIME_PARTS[name], format_share(seconds / total_s)
        if seconds:
            pieces.append(tag("i", class_=f"t-{name}", style=f"flex-grow:{seconds / total_s:.5f}", title=label))
        head = tag("th", tag("i", class_=f"t-{name}"), label, scope="row")
        rows.append(tag("tr", head, tag("td", format_seconds(seconds)), tag("td", share)))
    described = ", ".join(f"{TIME_PARTS[name]} {format_share(s / total_s)}" for name, s in parts.items())
    bar = tag("div", *pieces, class_="stack", role="img", aria_label=f"Where the time went: {described}")
    return join([bar, tag("table", tag("tbody", *rows), class_="legend")])


def _object_store(run: Run) -> list[Html]:
    spilled, fallback, capacity = run.figure("spilled_bytes"), run.figure("fallback_bytes"), run.capacity_bytes
    if spilled is None:
        return [missing("The object store was not recorded.")]
    text = "Nothing was spilled to disk" if not spilled else f"{format_bytes(spilled)} were spilled to disk"
    if fallback is not None:
        text += f", and {format_bytes(fallback) if fallback else 'nothing'} was allocated on disk"
    title = f"Used of {format_bytes(capacity)}" if capacity else "Used"
    chart = metric_chart(run.metrics, "object_store_bytes", title, unit="bytes", smoothed=False)
    return [tag("p", f"{text}."), chart]


def time_line(run: Run) -> Html:
    return section("Starts and checkpoints", tag("p", f"{_starts(run)} {_checkpoints(run.checkpoints)}"))


def _starts(run: Run) -> str:
    starts = sum(event["event"] == "start" for event in run.events)
    if starts < 2:
        return "Started once." if starts else ""
    steps = ", ".join(f"{step:,}" for step in run.restart_steps)
    total_s = max(0.0, run.events[-1]["time_s"] - run.events[0]["time_s"])
    return f"Started {starts} times in {format_seconds(total_s)}; restarted after optimizer step {steps}."


def _checkpoints(found: Checkpoints) -> str:
    place = f" in {shown_setting(found.elsewhere)}" if found.elsewhere else ""
    if found.steps is None:
        return f"Checkpoints are kept{place}."
    return f"Checkpoints kept{place}, by optimizer step: {', '.join(f'{step:,}' for step in found.steps) or 'none'}."
