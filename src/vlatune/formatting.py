"""Format numbers for people, and build escaped HTML and SVG.

Bytes use decimal units (1 kB = 1000 bytes), as in Ray's messages.

Escaping is the default: `tag("p", text)` escapes every child and attribute that is a plain string.
Only `Html`, which `tag` and `join` return, is inserted unchanged, so dataset strings (instructions,
camera names) can be passed unescaped.
"""

import html
import math
from collections.abc import Iterable, Sequence


def format_bytes(num_bytes: float) -> str:
    """Format a size: 12_345_678 -> '12.3 MB'; exact below a thousand: '0 bytes'."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} byte{'' if round(num_bytes) == 1 else 's'}"
    value = float(num_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5 or unit == "TB":  # 999.5 would round to four digits
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    raise AssertionError("unreachable: TB always returns")


def format_seconds(seconds: float) -> str:
    """Format a duration: 0.34 -> '340 ms', 12.34 -> '12.3 s', 200 -> '3 min 20 s'."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_share(share: float) -> str:
    """Format a fraction: 0.0123 -> '1.2 %', 0.41 -> '41 %', 0.0001 -> 'under 0.1 %'."""
    percent = 100 * share
    if 0 < percent < 0.05:
        return "under 0.1 %"
    return f"{percent:.0f} %" if percent == 0 or percent >= 9.95 else f"{percent:.1f} %"


def format_number(value: float, *, digits: int = 4) -> str:
    """Format with four significant digits and thousands separators: 0.04123, 12,345, 2.5e-5."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("infinite" if value > 0 else "-infinite")
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.{digits}g}".replace("e+0", "e")
    text = f"{value:.{digits}g}"
    return text.replace("e-0", "e-")


def plural(count: int, noun: str) -> str:
    """Format a count: (1, 'sample') -> '1 sample', (12000, 'sample') -> '12,000 samples'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


VOID_TAGS = {"img", "meta", "link", "br"}


class Html(str):
    """Markup that is inserted without escaping."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Html:
    """Build an element; attributes that are None are omitted. tag("p", "a < b", aria_label="x")
    returns <p aria-label="x">a &lt; b</p>."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    opening = name + "".join(f' {key}="{html.escape(str(value))}"' for key, value in pairs)
    if name in VOID_TAGS:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Concatenate the parts, escaping those that are not `Html`."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def shorten(text: str, most: int) -> str:
    """Truncate text to at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
