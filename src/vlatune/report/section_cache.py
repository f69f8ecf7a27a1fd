"""Render the report's section on what was stored instead of computed again."""

from vlatune.formatting import Html, format_bytes, format_number, format_seconds, format_share, shorten, tag
from vlatune.report.chart import has, metric_chart
from vlatune.report.page import MAX_TEXT, or_dash, row, section, table
from vlatune.run.run_folder import Run, StoreRecord


def stored(run: Run) -> Html:
    """Render the table of the start of the run, and hits, bytes and time saved by the frame cache."""
    stores = run.data.get("stores") if run.data else None
    if not stores or not stores["levels"]:
        return Html("")
    heads = ["stored", "size", "fits", "an epoch without", "with", ""]
    frames = stores["levels"][0]
    parts = [table(heads, map(_level, stores["levels"]), kind="sizes")]
    if frames["is_used"]:
        parts.append(table(None, _hits(run, frames), kind="figures"))
        if has(run.metrics, "cached_share"):
            name = "Share of images from the frame cache"
            parts.append(metric_chart(run.metrics, "cached_share", name, unit="share", least_top=1.0))
    if run.validations and (int8_loss := run.validations[-1].get("val_loss_int8")) is not None:
        losses = {"exact": run.validations[-1]["val_loss"], "int8": int8_loss}
        rows = [row(f"Held-out loss with {name} prefixes", format_number(loss)) for name, loss in losses.items()]
        parts.append(table(None, rows, kind="figures"))
    text = tag("p", "Estimated at the start of the run from measured rates of decoding and of the disk.")
    return section("Frame cache", text, *parts)


def _level(level: StoreRecord) -> Html:
    times_s = (level["epoch_s_without"], level["epoch_s_with"])
    return row(
        shorten(level["name"], MAX_TEXT),
        format_bytes(level["stored_bytes"]),
        format_share(level["share"]),
        *(or_dash(seconds, format_seconds) for seconds in times_s),
        shorten(level["decision"], MAX_TEXT),
    )


def _hits(run: Run, frames: StoreRecord) -> list[Html]:
    """Return rows with the samples read from the cache, their bytes, and the seconds saved."""
    hits, before = 0.0, 0
    for line in run.metrics:
        seen = line.get("samples_seen") or before
        hits, before = hits + (line.get("cached_share") or 0.0) * (seen - before), seen
    make_s, read_s = frames["make_s"], frames["read_s"]
    saved_s = None if make_s is None or read_s is None else max(0.0, hits * (make_s - read_s))
    return [
        row("Samples from the cache", f"{hits:,.0f} of {before:,}"),
        row("Read from the cache", format_bytes(hits * frames["sample_bytes"])),
        row("Reading time saved", or_dash(saved_s, format_seconds)),
    ]
