"""Where is a process that does not go on? Its stacks from outside, also while it is stopped or deep in C code. No Ray.

A process that may be asked registers a file and a signal; python writes its stacks there from the signal's own handler,
which needs neither the interpreter's lock nor a thread that still runs.
"""

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import IO

import psutil

DUMP_SIGNAL = signal.SIGUSR1
DEAD = "dead"
STATES = {
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "held by a debugger",
    psutil.STATUS_DISK_SLEEP: "waiting for the disk or a driver",
    psutil.STATUS_ZOMBIE: DEAD,
}
POLL_S = 0.05
QUIET_S = 0.5
"""Stacks are written piece by piece; on a busy machine their writer loses its core in between."""


def dump_stacks_to(file: IO[str]) -> None:
    """From now on DUMP_SIGNAL writes all threads' stacks to this open file."""
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)


def dump_stacks_no_more() -> None:
    """Before the file is closed."""
    faulthandler.unregister(DUMP_SIGNAL)


def process_state(pid: int) -> str:
    """In words, by the kernel: running, stopped by a signal, gone, ..."""
    try:
        return STATES.get(psutil.Process(pid).status(), "running")
    except psutil.NoSuchProcess:
        return "gone"


def dump_and_kill(pid: int, file: Path, *, wait_s: float = 3.0) -> str:
    """The process's state and stacks in words, after which it is gone.

    The signal to continue comes after the question, so that a stopped process answers before anything else.
    """
    state = process_state(pid)
    if state in ("gone", DEAD):
        return state
    before = _size(file)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
        os.kill(pid, signal.SIGCONT)
        _wait_for_more(file, before, wait_s)
        os.kill(pid, signal.SIGKILL)
    text = file.read_text(errors="replace")[before:] if file.exists() else ""
    return f"{state}\n{text or 'it did not tell its stacks'}"


def _wait_for_more(file: Path, before: int, wait_s: float) -> None:
    """Until the file has grown and stays as it is for a while."""
    size, until_s = before, time.monotonic() + wait_s
    while time.monotonic() < until_s:
        time.sleep(POLL_S)
        if (now := _size(file)) != size:
            size, until_s = now, time.monotonic() + QUIET_S


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
