"""The document around a page's sections, and the pieces that all pages are made of: the report, the comparison, doctor's.

Self-contained: style, script and pictures inside, no address it would fetch. The one script that may run is page.js, named by its
hash in the page's own security policy: should anything slip through the escaping of `formatting.tag`, the browser does
not run it. Without the script the page is whole; charts then neither read out values nor zoom.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any

from vlatune.report.formatting import Html, shorten, tag

MAX_TEXT = 400
"""Characters shown of a sentence or setting."""


def make_page(title: str, body: Html, *, reload_s: float | None = None) -> str:
    """A whole document around the sections; with `reload_s` one that the browser loads again after so many seconds."""
    style, script = _part("page.css"), _part("page.js")
    reload = [tag("meta", http_equiv="refresh", content=f"{max(reload_s, 1):.0f}")] if reload_s else []
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),  # known before the style is read: no white flash
        *reload,
        tag("title", shorten(title, MAX_TEXT)),
        tag("style", style),
    )
    body = tag("body", tag("main", body), tag("script", script))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def policy(script: str) -> str:
    """Nothing is fetched, and no script runs but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


def section(title: str, *parts: Html) -> Html:
    return tag("section", tag("h2", title), *parts)


def missing(*parts: str) -> Html:
    return tag("p", *parts, class_="missing")


def table(head: Iterable[str] | None, rows: Iterable[Html], *, kind: str = "settings") -> Html:
    """Rows under a head, in a box of their own: what is wider than a phone scrolls there, and not the page."""
    top = [tag("thead", tag("tr", *(tag("th", name, scope="col") for name in head)))] if head is not None else []
    return tag("div", tag("table", *top, tag("tbody", *rows), class_=kind), class_="wide", tabindex=0)


def row(name: str, *cells: str) -> Html:
    return tag("tr", tag("th", shorten(name, 120), scope="row"), *(tag("td", cell) for cell in cells))


def told(value: Any, write: Callable[[Any], str]) -> str:
    return "-" if value is None else write(value)


def command(words: Sequence[str]) -> Html:
    """A line for the shell, which page.js gives a button that copies it; it wraps between words where it can."""
    spaced = [part for word in words for part in (" ", tag("span", word))][1:]
    return tag("pre", *spaced, class_="command", tabindex=0)


def flat_settings(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}: the names of the flags."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flat_settings(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        )
    return flat


def shown_setting(value: Any) -> str:
    """A setting as text. A page is passed on more freely than a config: passwords and signatures in URLs stay behind."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"(?<=://)[^/@\s\"]+@", "", text)
    return shorten(re.sub(r"(://[^\s\"?]+)\?[^\s\"]+", r"\1?…", text), MAX_TEXT)


def _part(name: str) -> Html:
    return Html(resources.files("vlatune.report").joinpath(name).read_text(encoding="utf-8"))
