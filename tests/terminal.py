"""A command on a pseudo-terminal, whose size may change while it runs."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    columns: int,
    then: Mapping[str, int] | None = None,
    timeout_s: float = 400,
) -> tuple[int, str]:
    """Return exit code and output with escape sequences; `then` maps a text to the columns after it was written."""
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
    waiting, written, deadline_s = dict(then or {}), b"", time.monotonic() + timeout_s
    try:
        while data := _read(ours, deadline_s):
            written += data
            for text in [one for one in waiting if one.encode() in written]:
                _resize(ours, waiting.pop(text))
        return process.wait(timeout_s), written.decode(errors="replace")
    finally:
        os.close(ours)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def without_escapes(written: str) -> list[str]:
    """Return all lines that were drawn, also those that were drawn over."""
    return ESCAPE.sub("", written).replace("\r", "\n").split("\n")


def _resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def _read(terminal: int, deadline_s: float) -> bytes:
    if not select.select([terminal], [], [], max(deadline_s - time.monotonic(), 0))[0]:
        raise TimeoutError("the command did not end in time")
    try:
        return os.read(terminal, 65536)
    except OSError:  # its last user has ended
        return b""
