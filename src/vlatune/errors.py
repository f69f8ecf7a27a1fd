"""Errors with a meaning of their own, and the "did you mean" at the end of a message about a misspelt name.

ValueError is the user's input, RuntimeError the world.
"""

import difflib
import signal
from collections.abc import Iterable


class RunStoppedError(RuntimeError):
    """The run must not go on: trying again would end the same way."""


class TerminatedError(RuntimeError):
    """The process was asked to end (SIGTERM, Ctrl-C) and has done what it could."""

    def __init__(self, text: str, number: int = signal.SIGTERM) -> None:
        super().__init__(text)
        self.number = number
        """Of the signal; a shell's exit code is 128 more."""


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """`"; did you mean --batch_size?"` when a known name is close to `name`, else nothing.

    `lr` is close to `optimizer.lr`: a dotted name may be asked for by its end.
    """
    plain = {_plain(one): one for one in known}
    wanted = _plain(name)
    ends = [one for one in plain if one.endswith(f".{wanted}")]
    close = ends[:1] or difflib.get_close_matches(wanted, plain, n=1)
    return f"; did you mean {prefix}{plain[close[0]]}?" if close else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
