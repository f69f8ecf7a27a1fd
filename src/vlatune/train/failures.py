"""What went wrong, in our own words, out of Ray's layers around it; and where a process is that does not go on. No Ray.

A process that may be asked for its stacks registers a file and a signal; python writes them there from the signal's own
handler, which needs neither the interpreter's lock nor a thread that still runs: also while it is stopped or deep in C code.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from vlatune.errors import RunStoppedError, TerminatedError

LOST = re.compile(
    r"(?:gloo|nccl).*?(connection (?:reset|closed|refused)[\w ]*|broken pipe|timed out)", re.IGNORECASE | re.DOTALL
)
"""How the libraries that join the workers, gloo and NCCL, say that one does not answer."""
FINAL = (ValueError, RunStoppedError, TerminatedError)
"""Trying again would end the same way, or is not wanted."""


def root_cause(error: BaseException) -> Exception:
    """The error to speak of: one that is final, else that a process died, else the first in our own words."""
    found = list(_unwrap(error))
    final = next((one for one in found if type(one) in FINAL), None)
    if isinstance(final, Exception):
        return final
    dead = sorted(rank for one in found for rank, failure in _failures(one).items() if _died(failure))
    if dead:  # the others fail because of it, with words about lost connections
        ranks = ", ".join(str(rank) for rank in dict.fromkeys(dead))
        return RuntimeError(f"the process of rank {ranks} died")
    ours = next((one for one in found if type(one) is RuntimeError), None)
    if ours is not None and (lost := LOST.search(str(ours))):  # before Ray has told whose process died
        return RuntimeError(f"a worker lost another one while they exchanged gradients ({lost[1].lower()})")
    if isinstance(ours, Exception):
        return ours
    lines = str(error).strip().splitlines() or ["no message"]
    first_sentence = lines[-1].split(". ")[0][:200]  # Ray goes on for paragraphs; all of it is in logs/
    return RuntimeError(f"{type(error).__name__}: {first_sentence}")


def _unwrap(error: BaseException) -> Iterator[BaseException]:
    """Innermost first: Ray keeps the worker's error in `worker_failures`, `cause`, or Python's own chain."""
    inner = [*_failures(error).values(), getattr(error, "cause", None), error.__cause__]
    for each in inner:
        if isinstance(each, BaseException) and each is not error:
            yield from _unwrap(each)
    yield error


def _failures(error: BaseException) -> dict[int, BaseException]:
    """By rank."""
    return getattr(error, "worker_failures", {})


def _died(failure: BaseException) -> bool:
    """Whether Ray lost the process itself; its error types are known by name here, without Ray."""
    return any(type(one).__name__ in ("ActorDiedError", "RayActorError") for one in _unwrap(failure))


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
