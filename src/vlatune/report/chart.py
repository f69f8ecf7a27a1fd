"""A line chart as HTML that follows its column's width, and the page's light or dark colours.

The curves are an SVG stretched over the plot area (0..100 both ways, strokes keep their width); the labels are HTML
around it, so that they keep their size on a phone. Colours are CSS classes of page.css. The figures go along as JSON, out of
which page.js reads out values and writes the axes of a part that is zoomed into. What to draw is decided in plots.py.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vlatune.report.formatting import Html, format_bytes, format_number, format_share, tag

MAX_POINTS = 600
"""More would be drawn onto the same pixels."""
LARGEST = 1e300
"""At the end of an axis: the next powers of ten, and differences, are numbers, too."""
Unit = Literal["number", "bytes", "share"]
FORMATS = {"number": format_number, "bytes": format_bytes, "share": format_share}
"""How values are written; page.js has the same by the same names."""


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` onto 0..100, evenly or by their logarithm."""

    low: float
    high: float
    log: bool = False

    def place(self, values: ArrayLike) -> NDArray[np.float64]:
        low, high, at = self.low, self.high, np.asarray(values, dtype=np.float64)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), np.log10(np.where(at > 0, at, np.nan))
        return 100 * (at - low) / (high - low)

    def ticks(self, count: int, *, whole: bool = False) -> list[float]:
        if self.log:
            return log_ticks(self.low, self.high)
        return linear_ticks(self.low, self.high, count, whole=whole)


@dataclass(frozen=True)
class Line:
    """One curve; `style` is a class of page.css: raw, main, truth, or run0 to run5."""

    name: str
    xs: NDArray[np.float64]
    ys: NDArray[np.float64]
    style: str = "main"
    dots: bool = False
    """Its points alone."""


@dataclass(frozen=True)
class Chart:
    """Everything a line chart needs to be drawn."""

    title: str
    lines: tuple[Line, ...]
    x: Scale
    y: Scale
    x_name: str = "optimizer step"
    unit: Unit = "number"
    height_px: int = 200
    y_ticks: int = 3
    x_ticks: int = 4
    keys: bool = True
    """Name the lines above the plot; off where one legend serves many charts."""
    limit: tuple[str, float] | None = None
    """A named horizontal line."""
    shade_from: float | None = None
    """The part of the x axis that does not count."""
    marks: tuple[float, ...] = ()
    """Places on the x axis at which the run was started again."""

    def format_y(self, value: float) -> str:
        return FORMATS[self.unit](value)


def linear_ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """At least `count` round numbers from low to high, at the widest step of 1, 2 or 5 times a power of ten."""
    top = math.floor(math.log10(high - low)) + 1
    steps = (factor * 10.0**power for power in range(top, top - 4, -1) for factor in (5, 2, 1))
    ticks: list[float] = []
    for step in steps:
        if whole and step < 1 and ticks:
            break
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        ticks = [number * step for number in range(first, last + 1)]
        if len(ticks) >= count:
            break
    return ticks


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5 between them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def scale_of(*values: ArrayLike, from_zero: bool = False, log: bool = False) -> Scale:
    """A scale that holds all finite values with a little air; never of zero width."""
    joined = np.concatenate([np.ravel(np.asarray(part, dtype=np.float64)) for part in values])
    finite = np.clip(joined[np.isfinite(joined)], -LARGEST, LARGEST)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if log:
        return Scale(low / 1.15, high * 1.15, log=True)
    low = min(low, 0.0) if from_zero else low
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low if from_zero and low == 0 else low - air, high + air)


def span_of(xs: NDArray[np.float64]) -> Scale:
    """The x axis from the first to the last value; a single one gets a neighbour on each side."""
    xs = np.clip(xs, -LARGEST, LARGEST)
    low, high = (float(xs.min()), float(xs.max())) if xs.size else (0.0, 1.0)
    return Scale(low, high) if high > low else Scale(low - 1, high + 1)


def thin(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most MAX_POINTS of the points: the lowest and highest of each bucket, so that spikes stay visible."""
    if len(xs) <= MAX_POINTS:
        return xs, ys
    kept: list[int] = []
    for bucket in np.array_split(np.arange(len(xs)), MAX_POINTS // 2):
        finite = bucket[np.isfinite(ys[bucket])]
        if finite.size:
            kept += sorted({int(finite[ys[finite].argmin()]), int(finite[ys[finite].argmax()])})
    return xs[kept], ys[kept]


def draw(chart: Chart) -> Html:
    """The chart as a <figure>."""
    svg = tag(
        "svg",
        tag("title", _described(chart)),
        *_grid(chart),
        *(_curve(line, chart) for line in chart.lines),
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=_described(chart),
    )
    plot = tag("div", svg, *_labels(chart), class_="plot", style=f"height:{chart.height_px}px")
    return tag("figure", _caption(chart), plot, class_="chart", data_chart=_figures(chart))


def _caption(chart: Chart) -> Html:
    title = tag("span", chart.title, class_="name")
    named = [(line.name, f"{line.style}{' dots' * line.dots}") for line in chart.lines] if len(chart.lines) > 1 else []
    named += [("started again", "again")] if chart.marks else []
    return tag("figcaption", title, *([legend(named)] if named and chart.keys else []))


def legend(lines: Iterable[tuple[str, str]]) -> Html:
    """(name, style) of each line, with a stroke of its colour."""
    return tag(
        "span", *(tag("span", tag("i", class_=style), name, class_="key") for name, style in lines), class_="keys"
    )


def _described(chart: Chart) -> str:
    """What someone who cannot see the picture should know."""
    parts = [f"{chart.title} by {chart.x_name}"]
    for line in chart.lines:
        seen = line.ys[np.isfinite(line.ys)]
        if seen.size:
            parts.append(f"{line.name} from {chart.format_y(float(seen[0]))} to {chart.format_y(float(seen[-1]))}")
    return "; ".join(parts)


def _grid(chart: Chart) -> list[Html]:
    ticks = chart.y.place(chart.y.ticks(chart.y_ticks))
    marks = [tag("path", d=f"M0 {100 - at:.2f}H100", class_="grid") for at in ticks]
    if chart.shade_from is not None:
        left = float(np.clip(chart.x.place(chart.shade_from), 0, 100))
        marks.append(tag("rect", x=f"{left:.2f}", y=0, width=f"{100 - left:.2f}", height=100, class_="shade"))
    marks += [tag("path", d=f"M{float(chart.x.place(at)):.3f} 0V100", class_="again") for at in chart.marks]
    if chart.limit is not None:
        marks.append(tag("path", d=f"M0 {100 - float(chart.y.place(chart.limit[1])):.2f}H100", class_="limit"))
    return marks


def _labels(chart: Chart) -> list[Html]:
    y_ticks, x_ticks = chart.y.ticks(chart.y_ticks), chart.x.ticks(chart.x_ticks, whole=True)
    y_at, x_at = chart.y.place(y_ticks), chart.x.place(x_ticks)
    labels = [
        tag("span", chart.format_y(tick), class_="y", style=f"top:{100 - at:.2f}%")
        for tick, at in zip(y_ticks, y_at, strict=True)
    ]
    labels += [
        tag("span", f"{tick:,.0f}", class_="x", style=f"left:{at:.2f}%") for tick, at in zip(x_ticks, x_at, strict=True)
    ]
    if chart.limit is not None:
        top = 100 - float(chart.y.place(chart.limit[1]))
        labels.append(tag("span", chart.limit[0], class_="cap", style=f"top:{top:.2f}%"))
    return [*labels, tag("span", chart.x_name, class_="axis")]


def _curve(line: Line, chart: Chart) -> Html:
    xs, ys = thin(line.xs, line.ys)
    points, pen_up, dots = [], True, line.dots or np.isfinite(ys).sum() == 1
    for x, y in zip(chart.x.place(xs), 100 - chart.y.place(ys), strict=True):
        if math.isfinite(y):
            # A round cap on a stroke of no length is a dot, and stays round however the plot is stretched.
            points.append(f"{'M' if pen_up or dots else 'L'}{x:.3f} {y:.3f}{'h.01' if dots else ''}")
        pen_up = not math.isfinite(y)
    return tag("path", d="".join(points), class_=line.style + (" dot" if dots else ""))


def _figures(chart: Chart) -> str:
    """What page.js needs: the axes, and the points that are drawn. Without its own, a line has the xs of the one before."""
    lines, before = [], None
    for line in chart.lines:
        xs, ys = thin(line.xs, line.ys)
        same = before is not None and np.array_equal(xs, before)
        values = [_told(y) if math.isfinite(y) else None for y in ys]
        lines.append(
            {"name": line.name, "style": line.style, "xs": None if same else [_short(x) for x in xs], "ys": values}
        )
        before = xs
    told = {
        "title": chart.title,
        "xName": chart.x_name,
        "x": [chart.x.low, chart.x.high],
        "y": [chart.y.low, chart.y.high],
        "log": chart.y.log,
        "unit": chart.unit,
        "ticks": [chart.x_ticks, chart.y_ticks],
        "lines": lines,
    }
    return json.dumps(told, separators=(",", ":"), allow_nan=False)


def _told(y: float) -> float:
    """As many digits as are ever written: four, and before the point all of them."""
    return float(f"{y:.5g}") if abs(y) < 10_000 else round(float(y))


def _short(x: float) -> float:
    return int(x) if x == int(x) else round(float(x), 3)
