"""Build the HTML document around a page's sections, and the elements that all pages share.

Pages are self-contained: style, script and images are inlined. The content security policy allows
only page.js, by its hash, so that the browser runs no script that slips through the escaping of
`formatting.tag`. Without the script a page is complete, but charts do not show values.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from vlatune.formatting import Html, shorten, tag

MAX_TEXT = 400
"""Maximum length of an instruction or setting on a page, in characters."""
PNG_BYTES = 16_000
"""Store larger images (photographs) as JPEG to bound the size of the page."""
MAX_IMAGE_PX = 320


def make_page(title: str, body: Html) -> str:
    """Return a complete HTML document."""
    style, script = _part("page.css"), _part("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),  # avoids a white flash before the style is parsed
        tag("title", shorten(title, MAX_TEXT)),
        tag("style", style),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', body), tag('script', script)), lang='en')}\n"


def _part(name: str) -> Html:
    return Html(resources.files("vlatune.report").joinpath(name).read_text(encoding="utf-8"))


def section(title: str, *parts: Html) -> Html:
    return tag("section", tag("h2", title), *parts)


def pair(*parts: Html) -> Html:
    """Return the non-empty parts side by side; empty if there are none."""
    shown = [part for part in parts if part]
    return tag("div", *shown, class_="pair") if shown else Html("")


def folded(summary: str, part: Html) -> Html:
    """Return the part in a collapsible element."""
    return tag("details", tag("summary", summary), part)


def missing(*parts: str) -> Html:
    return tag("p", *parts, class_="missing")


def table(head: Iterable[str] | None, rows: Iterable[Html], *, kind: str = "settings") -> Html:
    """Return a table in a box that scrolls horizontally on narrow screens."""
    top = [tag("thead", tag("tr", *(tag("th", name, scope="col") for name in head)))] if head is not None else []
    return tag("div", tag("table", *top, tag("tbody", *rows), class_=kind), class_="wide", tabindex=0)


def row(name: str, *cells: str) -> Html:
    return tag("tr", tag("th", shorten(name, 120), scope="row"), *(tag("td", cell) for cell in cells))


def or_dash(value: Any, format_value: Callable[[Any], str]) -> str:
    return "-" if value is None else format_value(value)


def instruction(text: str) -> Html:
    return tag("blockquote", shorten(text, MAX_TEXT), dir="auto") if text.strip() else Html("")


def command(words: Sequence[str]) -> Html:
    """Return a shell command; page.js adds a button to copy it."""
    spaced = [part for word in words for part in (" ", tag("span", word))][1:]
    return tag("pre", *spaced, class_="command", tabindex=0)


def shown_setting(value: Any) -> str:
    """Format a setting, without credentials and query strings of URLs."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"(?<=://)[^/@\s\"]+@", "", text)
    return shorten(re.sub(r"(://[^\s\"?]+)\?[^\s\"]+", r"\1?…", text), MAX_TEXT)


def camera_image(image_CHW: np.ndarray, camera: str, place: str) -> Html:
    """Return a camera's image with its name; `place` names episode and frame for screen readers."""
    caption = tag("figcaption", shorten(camera.split(".")[-1], 60))
    return tag("figure", image(image_CHW, alt=f"{shorten(camera, 60)}, {place}"), caption)


def image(image_CHW: np.ndarray, *, alt: str) -> Html:
    """Return an <img> with its pixels inlined as a data URL."""
    import cv2  # only pages with images need it

    _, height, width = image_CHW.shape
    bgr = np.ascontiguousarray(image_CHW[::-1].transpose(1, 2, 0))
    if (shrink := MAX_IMAGE_PX / max(height, width)) < 1:
        bgr = cv2.resize(bgr, None, fx=shrink, fy=shrink, interpolation=cv2.INTER_AREA)
    format_, data = "png", cv2.imencode(".png", bgr)[1].tobytes()
    if len(data) > PNG_BYTES:
        format_, data = "jpeg", cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, 88])[1].tobytes()
    source = f"data:image/{format_};base64,{base64.b64encode(data).decode()}"
    return tag("img", src=source, alt=alt, width=width, height=height)
