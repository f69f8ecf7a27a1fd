"""Custom exceptions, and "did you mean" hints for misspelt names.

ValueError is a usage error, RuntimeError a runtime error.
"""

import difflib
import signal
from collections.abc import Iterable


class RunStoppedError(RuntimeError):
    """The run must stop: a restart would fail in the same way."""


class TerminatedError(RuntimeError):
    """The process received SIGTERM or Ctrl-C and has shut down cleanly."""

    def __init__(self, text: str, number: int = signal.SIGTERM) -> None:
        super().__init__(text)
        self.number = number
        """Signal number; the exit code is 128 more."""


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return `"; did you mean --batch_size?"` if a known name is close to `name`, else "".

    A dotted name also matches by its last part: `lr` is close to `optimizer.lr`.
    """
    plain = {_plain(one): one for one in known}
    wanted = _plain(name)
    ends = [one for one in plain if one.endswith(f".{wanted}")]
    close = ends[:1] or difflib.get_close_matches(wanted, plain, n=1)
    return f"; did you mean {prefix}{plain[close[0]]}?" if close else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


class RejectedAnswerError(Exception):
    """A response of a store was rejected: too long, or a redirect to another host."""
