"""Draw line charts and bars as responsive HTML.

Curves are an SVG stretched over the plot area (0..100 in both directions, constant stroke width).
Labels are HTML around it, so that they keep their size on a phone. Colors are CSS classes of
page.css. The values are embedded as JSON, from which page.js shows them at the pointer.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vlatune.formatting import Html, format_number, tag

MAX_POINTS = 600
"""Maximum points per line; more would share pixels."""
LARGEST = 1e300
"""Limit of axis values; leaves space for the next power of ten and for differences."""
LOG_SCALE_RATIO = 30
"""Use a log scale if the largest loss exceeds the smallest by this factor."""
SMOOTHED_PER_POINT = 40
"""Values of a line for each value that smoothing takes on either side."""
MAX_COLORS = 6
"""Number of line colors in page.css, run0 to run5."""
Unit = Literal["number", "bytes", "share"]
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
Records = Sequence[Mapping[Any, Any]]


@dataclass(frozen=True)
class Scale:
    """Map values from `low`..`high` onto 0..100, linearly or logarithmically."""

    low: float
    high: float
    log: bool = False

    def place(self, values: ArrayLike) -> NDArray[np.float64]:
        low, high, at = self.low, self.high, np.asarray(values, dtype=np.float64)
        if self.log:
            low, high, at = math.log10(low), math.log10(high), np.log10(np.where(at > 0, at, np.nan))
        return 100 * (at - low) / (high - low)

    def ticks(self, count: int, *, integers: bool = False) -> list[float]:
        if self.log:
            return log_ticks(self.low, self.high)
        return linear_ticks(self.low, self.high, count, integers=integers)


@dataclass(frozen=True)
class Line:
    """A curve; `style` is a class of page.css: raw, main, truth, or run0 to run5."""

    name: str
    xs: NDArray[np.float64]
    ys: NDArray[np.float64]
    style: str = "main"


@dataclass(frozen=True)
class Chart:
    """Description of a line chart."""

    title: str
    lines: tuple[Line, ...]
    y_scale: Scale | None = None
    """By default from zero to the largest value."""
    x_name: str = "optimizer step"
    unit: Unit = "number"
    height_px: int = 200
    y_ticks: int = 3
    x_ticks: int = 4
    keys: bool = True
    """Show a legend above the plot."""
    shade_from: float | None = None
    """Shade the x axis from here on."""
    marks: tuple[float, ...] = ()
    """X positions at which the run was restarted."""

    @cached_property
    def x(self) -> Scale:
        """Return the scale from the smallest to the largest x; never of zero width."""
        xs = np.clip(np.concatenate([line.xs for line in self.lines]), -LARGEST, LARGEST)
        low, high = (float(xs.min()), float(xs.max())) if xs.size else (0.0, 1.0)
        return Scale(low, high) if high > low else Scale(low - 1, high + 1)

    @cached_property
    def y(self) -> Scale:
        return self.y_scale or scale_of(*(line.ys for line in self.lines), from_zero=True)

    @cached_property
    def format(self) -> tuple[float, str]:
        """Return factor and suffix of all numbers on the y axis: 0.2 -> (100, ' %') -> '20 %'."""
        if self.unit == "bytes":
            size, name = next((pair for pair in BYTE_UNITS if self.y.high >= pair[0]), BYTE_UNITS[-1])
            return 1 / size, f" {name}"
        return (100.0, " %") if self.unit == "share" else (1.0, "")

    def format_y(self, value: float) -> str:
        return format_number(value * self.format[0]) + self.format[1]


def linear_ticks(low: float, high: float, count: int, *, integers: bool = False) -> list[float]:
    """Return at least `count` round numbers: multiples of 1, 2 or 5 times a power of ten."""
    top = math.floor(math.log10(high - low)) + 1
    steps = (factor * 10.0**power for power in range(top, top - 4, -1) for factor in (5, 2, 1))
    ticks: list[float] = []
    for step in steps:
        if integers and step < 1 and ticks:
            break
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        ticks = [number * step for number in range(first, last + 1)]
        if len(ticks) >= count:
            break
    return ticks


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, with 2 and 5 times them for small ranges."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
    return [factor * 10.0**power for power in powers for factor in factors if low <= factor * 10.0**power <= high]


def scale_of(*values: ArrayLike, from_zero: bool = False, log: bool = False) -> Scale:
    """Return a scale that contains all finite values with a margin; never of zero width."""
    joined = np.concatenate([np.ravel(np.asarray(part, dtype=np.float64)) for part in values])
    finite = np.clip(joined[np.isfinite(joined)], -LARGEST, LARGEST)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if log:
        return Scale(low / 1.15, high * 1.15, log=True)
    low = min(low, 0.0) if from_zero else low
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(low if from_zero and low == 0 else low - margin, high + margin)


def loss_chart(title: str, lines: Sequence[Line], **options: Any) -> Html:
    """Draw losses on a linear scale from zero, or on a log scale if they span a large range."""
    values = np.concatenate([line.ys for line in lines])
    finite = values[np.isfinite(values)]
    log = bool(finite.size and (finite > 0).all() and finite.max() / finite.min() > LOG_SCALE_RATIO)
    scale = scale_of(values, log=log, from_zero=not log)
    return draw(Chart(f"{title} (log scale)" if log else title, tuple(lines), scale, **options))


def metric_chart(
    records: Records,
    key: str,
    title: str,
    *,
    smoothed: bool = True,
    unit: Unit = "number",
    least_top: float = 0.0,
    height_px: int = 130,
) -> Html:
    """Draw one logged value from zero; empty if no record has it. The y axis reaches at least
    `least_top`."""
    if not has(records, key):
        return Html("")
    steps, values = column(records, "optimizer_step"), column(records, key)
    lines = smoothed_lines(steps, values) if smoothed else (Line("logged", steps, values),)
    scale = scale_of(values, [least_top], from_zero=True)
    return draw(Chart(title, lines, scale, unit=unit, height_px=height_px, keys=False))


def smoothed_lines(steps: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[Line, ...]:
    """Return the logged and the smoothed line; only the logged one if there is too little to smooth."""
    if len(values) < SMOOTHED_PER_POINT:
        return (Line("logged", steps, values),)
    return Line("logged", steps, values, "raw"), Line("smoothed", steps, smooth(values))


def column(records: Records, key: str | int) -> NDArray[np.float64]:
    """Return one key of all records; NaN where a record lacks it."""
    return np.array([np.nan if record.get(key) is None else record[key] for record in records], dtype=np.float64)


def has(records: Records, key: str) -> bool:
    """True if any record has a number under this key."""
    return bool(np.isfinite(column(records, key)).any())


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a centered moving mean over a twentieth of the run; NaN stays NaN. The window narrows
    towards both ends, so that the first and last values are not distorted."""
    finite, positions = np.isfinite(values), np.arange(len(values))
    sums, counts = (np.concatenate([[0.0], np.cumsum(part)]) for part in (np.where(finite, values, 0.0), finite))
    half = np.minimum(len(values) // SMOOTHED_PER_POINT, np.minimum(positions, positions[::-1]))
    begin, end = positions - half, positions + half + 1
    means = (sums[end] - sums[begin]) / np.maximum(counts[end] - counts[begin], 1)
    return np.where(finite, means, np.nan)


def thin(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Keep at most MAX_POINTS: the extremes of each bucket, so that spikes stay visible."""
    if len(xs) <= MAX_POINTS:
        return xs, ys
    kept: list[int] = []
    for bucket in np.array_split(np.arange(len(xs)), MAX_POINTS // 2):
        finite = bucket[np.isfinite(ys[bucket])]
        if finite.size:
            kept += sorted({int(finite[ys[finite].argmin()]), int(finite[ys[finite].argmax()])})
    return xs[kept], ys[kept]


def draw(chart: Chart) -> Html:
    """Render the chart as a <figure>."""
    description = _description(chart)
    svg = tag(
        "svg",
        tag("title", description),
        *_grid(chart),
        *(_curve(line, chart) for line in chart.lines),
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=description,
    )
    plot = tag("div", svg, *_labels(chart), class_="plot", style=f"height:{chart.height_px}px")
    names = [(line.name, line.style) for line in chart.lines] if len(chart.lines) > 1 else []
    names += [("restart", "restart")] if chart.marks else []
    caption = tag("figcaption", tag("span", chart.title, class_="name"), legend(names) if chart.keys else "")
    return tag("figure", caption, plot, class_="chart", data_chart=_values(chart))


def legend(lines: Iterable[tuple[str, str]]) -> Html:
    """Render a legend from the (name, style) of each line; empty without lines."""
    keys = [tag("span", tag("i", class_=style), name, class_="key") for name, style in lines]
    return tag("span", *keys, class_="keys") if keys else Html("")


def _description(chart: Chart) -> str:
    """Return the text alternative of the chart."""
    parts = [f"{chart.title} by {chart.x_name}"]
    for line in chart.lines:
        finite = line.ys[np.isfinite(line.ys)]
        if finite.size:
            parts.append(f"{line.name} from {chart.format_y(float(finite[0]))} to {chart.format_y(float(finite[-1]))}")
    return "; ".join(parts)


def _grid(chart: Chart) -> list[Html]:
    ticks = chart.y.place(chart.y.ticks(chart.y_ticks))
    paths = [tag("path", d=f"M0 {100 - at:.2f}H100", class_="grid") for at in ticks]
    if chart.shade_from is not None:
        left = float(np.clip(chart.x.place(chart.shade_from), 0, 100))
        paths.append(tag("rect", x=f"{left:.2f}", y=0, width=f"{100 - left:.2f}", height=100, class_="shade"))
    paths += [tag("path", d=f"M{float(chart.x.place(at)):.3f} 0V100", class_="restart") for at in chart.marks]
    return paths


def _labels(chart: Chart) -> list[Html]:
    y_ticks, x_ticks = chart.y.ticks(chart.y_ticks), chart.x.ticks(chart.x_ticks, integers=True)
    labels = [
        tag("span", chart.format_y(tick), class_="y", style=f"top:{100 - at:.2f}%")
        for tick, at in zip(y_ticks, chart.y.place(y_ticks), strict=True)
    ]
    labels += [
        tag("span", f"{tick:,.0f}", class_="x", style=f"left:{at:.2f}%")
        for tick, at in zip(x_ticks, chart.x.place(x_ticks), strict=True)
    ]
    return [*labels, tag("span", chart.x_name, class_="axis")]


def _curve(line: Line, chart: Chart) -> Html:
    xs, ys = thin(line.xs, line.ys)
    points, pen_up, dots = [], True, np.isfinite(ys).sum() == 1
    for x, y in zip(chart.x.place(xs), 100 - chart.y.place(ys), strict=True):
        if math.isfinite(y):
            # A zero-length stroke with round caps is a dot that stays round under stretching.
            points.append(f"{'M' if pen_up or dots else 'L'}{x:.3f} {y:.3f}{'h.01' if dots else ''}")
        pen_up = not math.isfinite(y)
    return tag("path", d="".join(points), class_=line.style + (" dot" if dots else ""))


def _values(chart: Chart) -> str:
    """Return the points as JSON for page.js; `xs` is null if equal to the previous line's."""
    lines, before = [], None
    for line in chart.lines:
        xs, ys = thin(line.xs, line.ys)
        is_equal = before is not None and np.array_equal(xs, before)
        short_xs = None if is_equal else [int(x) if x == int(x) else round(float(x), 3) for x in xs]
        # All digits that are displayed: at least four, and all before the decimal point.
        rounded = (round(float(y)) if abs(y) >= 10_000 else float(f"{y:.5g}") for y in np.nan_to_num(ys))
        short_ys = [y if math.isfinite(exact) else None for y, exact in zip(rounded, ys, strict=True)]
        lines.append({"name": line.name, "style": line.style, "xs": short_xs, "ys": short_ys})
        before = xs
    values = {
        "title": chart.title,
        "xName": chart.x_name,
        "x": [chart.x.low, chart.x.high],
        "format": chart.format,
        "lines": lines,
    }
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


def bars(
    rows: Sequence[tuple[str, float, str]],
    name: str,
    *,
    most: int | None = None,
    format_value: Callable[[float], str] = lambda value: format_number(value, digits=3),
) -> Html:
    """Draw a table of (label, value, CSS class) with a bar in each of the first `most` rows."""
    name += f"; the first {most} of {len(rows):,}" if most is not None and len(rows) > most else ""
    rows = rows[:most]
    longest = max((abs(value) for _, value, _ in rows), default=0.0) or 1.0
    body = []
    for label, value, style in rows:
        bar = tag("i", class_=f"bar {style}", style=f"width:{100 * abs(value) / longest:.2f}%")
        cells = tag("td", bar, class_="track"), tag("td", format_value(value), class_="figure")
        body.append(tag("tr", tag("th", label, scope="row"), *cells))
    return tag("table", tag("caption", name), tag("tbody", *body), class_="bars")
