"""The result of a check, in the form that every check returns.

A run logs warnings, and `vlatune inspect` and `vlatune doctor` list all findings.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

type Level = Literal["pass", "skipped", "warn", "fail"]
LEVELS: tuple[Level, ...] = ("pass", "skipped", "warn", "fail")
"""Levels from best to worst. "skipped" is a check that needs the result of a failed one."""


@dataclass(frozen=True)
class Finding:
    level: Level
    check: str
    """Name of the check, such as `statistics`."""
    text: str
    """What was found, with its value."""
    place: str = ""
    """Where: dataset, episode, frame, file, feature."""
    expected: str = ""
    remedy: str = ""
    """What to do, as an instruction to the user."""
    flags: tuple[str, ...] = ()
    """Flags of `vlatune train` that fix it; they replace flags of the same name."""
    command: str = ""
    """Shell command that fixes it."""
    examples: tuple[str, ...] = ()
    """The first occurrences."""
    count: int = 1
    """Number of occurrences."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Values for `--json`."""

    def __str__(self) -> str:
        """Return one line: `place: text, expected ...; remedy`."""
        place = f"{self.place}: " if self.place else ""
        expected = f", expected {self.expected}" if self.expected else ""
        return f"{place}{self.text}{expected}" + (f"; {self.remedy}" if self.remedy else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def finding_of(error: Exception | str, check: str, level: Level = "fail") -> Finding:
    """Convert an error or a message to a finding; our messages have the form "place: text; remedy"."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, ValueError | RuntimeError | str):
        text = f"{type(error).__name__}: {text}"
    text, _, remedy = text.partition("; ")
    return Finding(level, check, text, remedy=remedy)


def raise_failed(findings: Iterable[Finding]) -> None:
    """Raise ValueError for the first failed finding, if any."""
    for finding in findings:
        if finding.level == "fail":
            raise ValueError(str(finding))


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level, "pass" without findings."""
    return LEVELS[max((LEVELS.index(finding.level) for finding in findings), default=0)]
