"""HTML and SVG built so that escaping is what happens when nobody thinks of it.

`tag("p", text)` escapes every child and attribute that is a plain string; only `Html`, which `tag` and `join` make,
passes as it is. Strings from a dataset (sentences, camera names) can therefore be handed over raw.
"""

import html
from collections.abc import Iterable

VOID_TAGS = {"img", "meta", "link", "br"}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Html:
    """tag("p", "a < b", class_="note", aria_label="x") -> <p class="note" aria-label="x">a &lt; b</p>; None leaves out."""
    pairs = ((_attribute(key), value) for key, value in attributes.items() if value is not None)
    opening = name + "".join(f' {key}="{html.escape(str(value))}"' for key, value in pairs)
    if name in VOID_TAGS:
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """The parts one after another, each escaped unless it is markup."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def shorten(text: str, most: int) -> str:
    """A string of unknown origin may be a megabyte long."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
