"""Draw horizontal bars as an SVG file that stands alone, readable on light and dark pages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

NAME_PX, BAR_PX, VALUE_PX, LINE_PX, TITLE_PX = 130, 150, 80, 24, 34
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #57606a; } .title { font-weight: 600; }
.bar { fill: #b6bec7; } .strong { fill: #2f6fde; }
@media (prefers-color-scheme: dark) { text { fill: #b1bac4; } .bar { fill: #57606a; } .strong { fill: #6ea1ff; } }
"""


@dataclass(frozen=True)
class Panel:
    title: str
    values: Mapping[str, float]
    """Name -> value; all panels have the same names."""
    format_value: Callable[[float], str]


def draw_bars(panels: Sequence[Panel], *, strong: str) -> str:
    """Return panels side by side; the bar of `strong` is coloured."""
    names = list(panels[0].values)
    parts = [_text(0, TITLE_PX + LINE_PX * row + 16, name) for row, name in enumerate(names)]
    for number, panel in enumerate(panels):
        left, largest = NAME_PX + number * (BAR_PX + VALUE_PX), max(panel.values.values()) or 1.0
        parts.append(_text(left, 16, panel.title, "title"))
        for row, name in enumerate(names):
            width, top = BAR_PX * panel.values[name] / largest, TITLE_PX + LINE_PX * row
            kind = "strong" if name == strong else "bar"
            parts.append(
                f'<rect class="{kind}" x="{left}" y="{top + 3}" width="{max(width, 1):.1f}" height="16" rx="2"/>'
            )
            parts.append(_text(left + width + 6, top + 16, panel.format_value(panel.values[name])))
    width, height = NAME_PX + len(panels) * (BAR_PX + VALUE_PX), TITLE_PX + LINE_PX * len(names) + 6
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'
