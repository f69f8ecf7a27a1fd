"""Format findings for the terminal."""

import textwrap
from collections.abc import Iterator

from vlatune.config.flags import quote_flags
from vlatune.console import printable
from vlatune.findings import Finding


def finding_lines(one: Finding, width: int, *, first: str) -> Iterator[str]:
    """Yield wrapped lines: place and text, examples, expectation, remedy; flags stay on one line."""
    indent = " " * len(first)
    yield from _wrapped(f"{one.place}: {one.text}" if one.place else one.text, width, first=first, rest=indent)
    if one.level not in ("warn", "fail"):
        return
    for example in one.examples:
        yield from _wrapped(example, width, first=f"{indent}- ", rest=f"{indent}  ")
    if one.count > len(one.examples) > 0:
        yield f"{indent}- and {one.count - len(one.examples):,} more"
    if one.expected:
        yield from _wrapped(f"expected: {one.expected}", width, first=indent, rest=f"{indent}  ")
    if one.remedy or one.flags or one.command:
        colon = ":" if one.flags or one.command else ""
        yield from _wrapped(f"to do: {one.remedy or 'add'}{colon}", width, first=indent, rest=f"{indent}  ")
    for text in (one.command, quote_flags(one.flags)):
        if text:
            yield f"{indent}  {printable(text)}"


def _wrapped(text: str, width: int, *, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        max(width, 60),
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
