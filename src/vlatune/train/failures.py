"""Find the root cause of Ray errors, and dump stacks of hanging processes. No Ray.

A process that can dump its stacks registers a file in memory and a signal. faulthandler writes from
the signal handler, which needs neither the GIL nor a running thread, so it works even in C code.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from vlatune.config.settings import RunConfig
from vlatune.errors import RunStoppedError, TerminatedError
from vlatune.registry import get_policy_info
from vlatune.storage.remote_retry import chain

LOST = re.compile(
    r"(?:gloo|nccl).*?(connection (?:reset|closed|refused)[\w ]*|broken pipe|timed out)", re.IGNORECASE | re.DOTALL
)
"""Matches errors of gloo and NCCL about a worker that does not respond."""
FULL = re.compile(
    r"out of memory\. tried to allocate|error: out of memory|_STATUS_ALLOC_FAILED|cuda failure.{0,8}out of memory",
    re.IGNORECASE,
)
"""Matches errors of torch, CUDA, cuBLAS, cuDNN and NCCL about a full device, but not Ray's about a full host."""
FINAL = (ValueError, RunStoppedError, TerminatedError)
"""Errors that are not retried: a restart would fail in the same way, or is not wanted."""


def root_cause(error: BaseException) -> Exception:
    """Return the error to report: a final one, else a dead process, else our first RuntimeError."""
    found = list(_unwrap(error))
    final = next((one for one in found if type(one) in FINAL), None)
    if isinstance(final, Exception):
        return final
    dead = sorted(rank for one in found for rank, failure in _failures(one).items() if _died(failure))
    if dead:  # the other ranks fail with connection errors as a consequence
        ranks = ", ".join(str(rank) for rank in dict.fromkeys(dead))
        return RuntimeError(f"the process of rank {ranks} died")
    ours = next((one for one in found if type(one) is RuntimeError), None)
    if ours is not None and (lost := LOST.search(str(ours))):  # Ray may not have reported the dead process yet
        return RuntimeError(f"a worker lost another one while they exchanged gradients ({lost[1].lower()})")
    if isinstance(ours, Exception):
        return ours
    lines = str(error).strip().splitlines() or ["no message"]
    first_sentence = lines[-1].split(". ")[0][:200]  # Ray's messages span paragraphs; logs/ has all of it
    return RuntimeError(f"{type(error).__name__}: {first_sentence}")


@contextlib.contextmanager
def full_device_is_final(config: RunConfig) -> Iterator[None]:
    """Raise RunStoppedError with a remedy if device memory was exhausted, at any depth of an error."""
    try:
        yield
    except Exception as error:
        full = next((one for one in chain(error) if FULL.search(str(one))), None)
        if full is None:
            raise
        figures = " ".join(str(full).split()).partition(" If reserved")[0].rstrip(".")[:500]
        raise RunStoppedError(
            f"the device's memory is too small for --batch_size={config.batch_size}: {figures}; try "
            f"{' '.join(smaller_flags(config))}, then start the same command with these flags; `vlatune doctor` with "
            "the flags of this run lists what fits"
        ) from error


def smaller_flags(config: RunConfig) -> tuple[str, ...]:
    """Return flags that need less device memory; the global batch stays the same."""
    parts = next((parts for parts in range(2, config.batch_size + 1) if config.batch_size % parts == 0), None)
    if parts:
        return f"--batch_size={config.batch_size // parts}", f"--grad_accum={config.grad_accum * parts}"
    info = get_policy_info(config.policy.type)
    if "gradient_checkpointing" in info.settings and not config.policy.gradient_checkpointing:
        return ("--policy.gradient_checkpointing=true",)
    modes = tuple(info.train_modes)
    smaller = modes[: modes.index(config.policy.train)] if config.policy.train in modes else ()
    return (f"--policy.train={smaller[-1]}",) if smaller else ("a larger GPU",)


def _unwrap(error: BaseException) -> Iterator[BaseException]:
    """Yield nested errors, innermost first, from Ray's attributes and `__cause__`."""
    ray_inner = (getattr(error, name, None) for name in ("controller_failure", "cause"))
    inner = [*_failures(error).values(), *ray_inner, error.__cause__]
    for each in inner:
        if isinstance(each, BaseException) and each is not error:
            yield from _unwrap(each)
    yield error


def _failures(error: BaseException) -> dict[int, BaseException]:
    return getattr(error, "worker_failures", {})


def _died(failure: BaseException) -> bool:
    """True if Ray lost the process; compares type names to avoid importing Ray."""
    return any(type(one).__name__ in ("ActorDiedError", "RayActorError") for one in _unwrap(failure))


DUMP_SIGNAL = signal.SIGUSR1
STACKS = "vlatune-stacks"
DEAD = "dead"
STATES = {
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "held by a debugger",
    psutil.STATUS_DISK_SLEEP: "waiting for the disk or a driver",
    psutil.STATUS_ZOMBIE: DEAD,
}
POLL_S = 0.05
QUIET_S = 0.5
"""Stacks are complete if the file has not grown for this long."""


def dump_stacks_on_signal() -> int:
    """Make DUMP_SIGNAL write the stacks of all threads to a file in memory; return its descriptor."""
    file = os.memfd_create(STACKS)
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
    return file


def stop_dumping_stacks() -> None:
    """Unregister DUMP_SIGNAL and close the file."""
    faulthandler.unregister(DUMP_SIGNAL)
    if file := _stacks_of(os.getpid()):
        os.close(int(file.name))


def _stacks_of(pid: int) -> Path | None:
    """Return the path that leads to the open file of a process."""
    with contextlib.suppress(OSError):  # the process ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed
                if str(file.readlink()).startswith(f"/memfd:{STACKS} "):
                    return file
    return None


def process_state(pid: int) -> str:
    """Describe the state of a process: running, stopped by a signal, gone, ..."""
    try:
        return STATES.get(psutil.Process(pid).status(), "running")
    except psutil.NoSuchProcess:
        return "gone"


def dump_and_kill(pid: int, *, wait_s: float = 3.0) -> str:
    """Kill a process; return a description of its state and stacks.

    SIGCONT is sent after DUMP_SIGNAL, so that a stopped process dumps its stacks before continuing.
    """
    state = process_state(pid)
    if state in ("gone", DEAD):
        return state
    text, file = "", _stacks_of(pid)
    with contextlib.suppress(ProcessLookupError):
        if file is not None:
            with contextlib.suppress(OSError):  # the process ended
                os.kill(pid, DUMP_SIGNAL)
                os.kill(pid, signal.SIGCONT)
                _wait_for_more(file, wait_s)
                text = file.read_text(errors="replace")
        os.kill(pid, signal.SIGKILL)
    return f"{state}\n{text or 'it did not write its stacks'}"


def _wait_for_more(file: Path, wait_s: float) -> None:
    """Wait until the file has grown and then stops growing."""
    size, until_s = file.stat().st_size, time.monotonic() + wait_s
    while time.monotonic() < until_s:
        time.sleep(POLL_S)
        if (now := file.stat().st_size) != size:
            size, until_s = now, time.monotonic() + QUIET_S
