"""Read the fenced blocks of README.md and docs/, and the commands in them.

A block's language is the first word of its fence. A block without a language is shell if its first line begins with the name of
a program. A line that begins with `# needs` states what the commands after it in the block need.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from repository_files import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PROGRAMS = (
    "vlatune",
    "make",
    "lerobot-",
    "python",
    "pip ",
    "hf ",
    "tensorboard",
    "wandb ",
    "ray ",
    "docker ",
)
NEEDS = "# needs "


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Number of its first line of text."""
    info: str
    """Text after the opening fence."""
    text: str

    @property
    def language(self) -> str:
        named, first = (self.info.split() or [""])[0], self.text.lstrip()
        return "sh" if not named and first.startswith(PROGRAMS) and not first.startswith("vlatune:") else named

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    place: str
    words: tuple[str, ...]
    needs: str | None = None

    def __str__(self) -> str:
        return f"{self.place} {' '.join(self.words)[:70]}"


def blocks(page: Path) -> Iterator[Block]:
    begin, info, text = 0, "", []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```") and not begin:
            begin, info, text = number + 1, line.removeprefix("```").strip(), []
        elif line.startswith("```"):
            yield Block(page, begin, info, "\n".join(text) + "\n")
            begin = 0
        elif begin:
            text.append(line)
    assert not begin, f"{page.name}:{begin}: the fence is not closed"


def commands(block: Block) -> Iterator[Command]:
    """Yield complete commands, which may span several lines."""
    needs, held, begin = None, "", 0
    for number, line in enumerate(block.text.splitlines(), block.line):
        if not held and line.startswith(NEEDS):
            needs = line.removeprefix(NEEDS)
        begin, held = (begin if held else number), f"{held}{line}\n"
        words = _words(held)
        if words is not None:
            held = ""
            if words:
                yield Command(f"{block.page.name}:{begin}", tuple(words), needs)
    assert not held, f"{block.place}: the last command is incomplete"


def _words(text: str) -> list[str] | None:
    """Split a command; None if it continues on the next line."""
    if text.endswith("\\\n"):
        return None
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:  # an open quote
        return None


def all_commands() -> list[Command]:
    """Return the commands of every shell block; `...` stands for the flags of the previous command."""
    found: list[Command] = []
    for block in (block for page in PAGES for block in blocks(page) if block.language == "sh"):
        before: tuple[str, ...] = ()
        for command in commands(block):
            words = command.words
            if "..." in words:
                at = words.index("...")
                words = (*words[:at], *(word for word in before if word.startswith("--")), *words[at + 1 :])
            before = words
            found.append(Command(command.place, words, command.needs))
    return found


def inline_commands() -> list[Command]:
    """Return the commands `vlatune ...` within text."""
    return [
        Command(f"{page.name}:{number}", tuple(text.replace("'", "").replace('"', "").split()))
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for text in re.findall(r"`(vlatune [a-z][^`]*)`", line)
    ]
