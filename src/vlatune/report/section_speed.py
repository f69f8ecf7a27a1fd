"""Render the report's sections on speed: throughput, time, restarts and cluster."""

from collections.abc import Mapping

from vlatune.formatting import Html, format_bytes, format_seconds, format_share, join, plural, shorten, tag
from vlatune.report.chart import bars, has, metric_chart
from vlatune.report.page import MAX_TEXT, folded, missing, or_dash, pair, row, section, shown_setting, table
from vlatune.run.run_folder import Checkpoints, Run
from vlatune.run.verdict import Verdict, judge, time_left_s

TIME_PARTS = {
    "start": "start-up, until the first batch",
    "compute": "computing",
    "wait": "waiting for data",
    "checkpoint": "saving checkpoints",
    "validation": "validation",
    "other": "other",
}
STAGES = {
    "decode": "decoding, all readers",
    "transport": "through the object store",
    "collate": "collating batches",
    "copy": "copying to the device",
}
"""Labels of the stages that run in parallel to the loop; see meters.py."""


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
    """Render the speed verdict, throughput, and where the time went."""
    rate = metric_chart(run.metrics, "samples_per_s", "Samples per second")
    wait = metric_chart(run.metrics, "wait_share", "Share of the time waiting for data", unit="share", least_top=0.1)
    time_s = run.summary.time_s if run.summary else None
    bar = _time_bar(time_s) if time_s else missing("Not recorded: the run has not written its summary.")
    verdict = [verdict_line(run_verdict(run))] if run.summary else []
    return section("Speed", *verdict, pair(rate, wait), tag("h3", "Where the time went"), bar)


def _time_bar(time_s: Mapping[str, float]) -> Html:
    """Draw one bar split by activity, with a table as its legend."""
    parts = {name: max(0.0, time_s[name]) for name in TIME_PARTS if name in time_s}
    parts["other"] = max(0.0, time_s.get("total", 0.0) - sum(parts.values()))
    total_s = sum(parts.values()) or 1.0
    if parts["other"] < 0.005 * total_s:  # rounding errors
        del parts["other"]
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


def stored(run: Run) -> Html:
    """Render what was stored instead of computed again; empty if nothing could be stored."""
    levels = run.data["stores"]["levels"] if run.data and "stores" in run.data else ()
    if not levels:
        return Html("")
    rows = []
    for level in levels:
        times_s = (or_dash(level[key], format_seconds) for key in ("epoch_s_without", "epoch_s_with"))
        sizes = format_bytes(level["stored_bytes"]), format_share(level["share"])
        rows.append(row(shorten(level["name"], MAX_TEXT), *sizes, *times_s, shorten(level["decision"], MAX_TEXT)))
    text = tag("p", "Estimated at the start of the run from measured rates of decoding and of the disk.")
    heads = ["stored", "size", "fits", "an epoch without", "with", ""]
    name = "Share of images from the frame cache"
    hits = metric_chart(run.metrics, "cached_share", name, unit="share", least_top=1.0)
    return section("Frame cache", text, table(heads, rows, kind="sizes"), *([hits] if levels[0]["is_used"] else []))


def cluster(run: Run) -> Html:
    """Render readers and object store, collapsed unless bytes were spilled."""
    spilled = bool(run.figure("spilled_bytes") or run.figure("fallback_bytes"))
    body = tag("div", _counts(run), _stages(run), *_object_store(run), class_="inside")
    return section("Cluster", folded("Readers and object store", body, is_open=spilled))


def _counts(run: Run) -> Html:
    peak, readers = run.figure("peak_object_store_bytes"), run.figure("num_readers")
    share = f" ({format_share(peak / run.capacity_bytes)} of the store)" if peak and run.capacity_bytes else ""
    rows = [row("Readers", f"{readers:,}")] if readers is not None else []
    rows += [row("Peak object store", format_bytes(peak) + share)] if peak is not None else []
    return table(None, rows, kind="figures") if rows else Html("")


def _stages(run: Run) -> Html:
    """Draw the seconds of each data stage, and of computing for comparison."""
    time_s = run.summary.time_s if run.summary else {}
    rows = [(label, time_s[stage], "faded") for stage, label in STAGES.items() if time_s.get(stage)]
    if not rows:
        return Html("")
    rows.append(("computing, in the training loop", time_s.get("compute", 0.0), "main"))
    name = "Seconds of preparing data in parallel to training, all workers"
    return bars(rows, name, format_value=format_seconds)


def _object_store(run: Run) -> list[Html]:
    spilled, fallback, capacity = run.figure("spilled_bytes"), run.figure("fallback_bytes"), run.capacity_bytes
    parts = []
    if spilled is not None:
        text = "Nothing was spilled to disk" if not spilled else f"{format_bytes(spilled)} were spilled to disk"
        if fallback is not None:
            text += f", and {format_bytes(fallback) if fallback else 'nothing'} was allocated on disk"
        parts.append(tag("p", text + "."))
    if has(run.metrics, "object_store_bytes"):
        of = f", of {format_bytes(capacity)}" if capacity else ""
        parts.append(metric_chart(run.metrics, "object_store_bytes", f"Object store{of}", unit="bytes", smoothed=False))
    return parts or [missing("The object store was not recorded.")]


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
        return f"Checkpoints{place}: not reachable when this page was written."
    return f"Checkpoints kept{place}, by optimizer step: {', '.join(f'{step:,}' for step in found.steps) or 'none'}."
