"""What went wrong, in our own words, out of Ray's layers around it. No Ray."""

import re
from collections.abc import Iterator

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
