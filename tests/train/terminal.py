"""A command on a terminal of its own, as a person starts it: a pseudo-terminal, whose size may change meanwhile."""

import fcntl
import os
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    command: Sequence[str], *, env: Mapping[str, str], columns: int, then: Mapping[str, int] | None = None
) -> tuple[int, str]:
    """Exit code, and all that it wrote, escapes included. `then`: once this text was written, so many columns."""
    ours, theirs = os.openpty()
    _resize(ours, columns)
    size = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        command,
        env=size | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    waiting, written = dict(then or {}), b""
    while data := _read(ours):
        written += data
        for text in [one for one in waiting if one.encode() in written]:
            _resize(ours, waiting.pop(text))
    os.close(ours)
    return process.wait(), written.decode(errors="replace")


def without_escapes(written: str) -> list[str]:
    """Lines as they were drawn, one after the other, those that were drawn over included."""
    return [line.rpartition("\r")[2] for line in ESCAPE.sub("", written).replace("\r\n", "\n").split("\n")]


def _resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # its last user is gone
        return b""
