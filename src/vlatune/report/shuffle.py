"""How well the samples were mixed, in words: the `shuffle` part of summary.json, as the meter of the order wrote it."""

from typing import Any

from vlatune.report.markup import Html, tag
from vlatune.report.units import format_number, format_share

DISTINCT_FINE = 0.9
"""Of the episodes in a permutation's batch; below, batches lean towards single episodes."""
NEIGHBOURS_FINE = 2.0
"""Times the permutation's rate of neighbouring frames; above, batches hold frames that are nearly the same."""


def shuffle_meaning(shuffle: dict[str, Any]) -> str:
    """One sentence on what the figures mean for learning."""
    few = (shuffle["distinct_episodes"]["ratio"] or 1.0) < DISTINCT_FINE
    close = (shuffle["neighbour_rate"]["ratio"] or 0.0) > NEIGHBOURS_FINE
    if not few and not close:
        return "A batch is as varied as if all frames had been shuffled singly, though neighbours are decoded together."
    what = " and ".join(
        words for words, found in (("fewer episodes", few), ("more neighbouring frames", close)) if found
    )
    return (
        f"A batch holds {what} than if all frames had been shuffled singly, so its gradient is noisier: "
        f"a smaller --dataset.run_length or a larger --dataset.window_rows mixes better."
    )


def shuffle_table(shuffle: dict[str, Any]) -> Html:
    """The figures of the run's order beside those of a true permutation."""
    number = _rounded
    rows = (
        ("Episodes in a batch", shuffle["distinct_episodes"], number),
        ("Samples whose next frame is in the batch, too", shuffle["neighbour_rate"], format_share),
        ("Steps between a frame and the next one, median", shuffle["neighbour_steps"], number),
    )
    body = [_row(name, write(of["order"]), write(of["permutation"])) for name, of, write in rows]
    body.append(_row("Distance to a true permutation, 0 to 1", number(shuffle["distance"]), "0"))
    head = _row(f"First epoch, batches of {shuffle['global_batch']:,}", "this run", "a true permutation")
    return tag("table", tag("tbody", head, *body), class_="settings")


def _rounded(value: float) -> str:
    return format_number(value, digits=3)


def _row(name: str, *cells: str) -> Html:
    return tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in cells))
