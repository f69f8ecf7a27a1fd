"""Saves in the background, one at a time; a save that failed is raised at the next step.

The loop hands over a snapshot and goes on; hashing, writing, syncing, uploading and pruning happen on a thread. A new
save waits for the one before. A failed save ends the run (RunStoppedError): the same command continues from the last
good checkpoint once the cause is gone, which is named.
"""

import errno
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vlatune.checkpoint.phases import OnPhase, no_phase
from vlatune.checkpoint.store import Store, WriteFile, prune, write_checkpoint
from vlatune.errors import RunStoppedError

REMEDIES = {
    errno.ENOSPC: "free some space, keep fewer (--keep_checkpoints, --keep_best), or use another --storage_path",
    errno.EDQUOT: "the quota is used up: free some space, or use another --storage_path",
    errno.EFBIG: "the filesystem or a limit (ulimit -f) allows no file of this size",
    errno.EACCES: "give this user the right to write there, or use another --storage_path",
    errno.EPERM: "give this user the right to write there, or use another --storage_path",
    errno.EROFS: "the filesystem is read-only: mount it for writing, or use another --storage_path",
}


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay."""

    last: int
    best: int = 0
    """By training loss; see Manifest.loss."""


class BackgroundWriter:
    def __init__(
        self,
        store: Store,
        keep: Keep,
        *,
        every_s: float = 0.0,
        on_phase: OnPhase = no_phase,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._keep, self._on_phase = store, keep, on_phase
        self._every_s, self._clock, self._last_s = every_s, clock, clock()
        self._thread: threading.Thread | None = None
        self._error: RunStoppedError | None = None
        store.clean()

    def is_due(self) -> bool:
        """Has `every_s` passed since the last save began?"""
        return self._every_s > 0 and self._clock() - self._last_s >= self._every_s

    def save(
        self,
        optimizer_step: int,
        files: Mapping[str, WriteFile],
        *,
        loss: float | None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint on the thread; waits first for the one that is under way.

        `on_failure` is called there, once what went wrong can be asked for with `check`.
        """
        self.wait()
        self._last_s = self._clock()
        self._thread = threading.Thread(
            target=self._write, args=(optimizer_step, files, loss, on_failure), name="checkpoint", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong in the background; costs nothing when nothing did."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Let the save under way end, however it ends."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Until the last save is committed; raises when it failed."""
        self.join()
        self.check()

    def _write(
        self,
        optimizer_step: int,
        files: Mapping[str, WriteFile],
        loss: float | None,
        on_failure: Callable[[], None] | None,
    ) -> None:
        doing = f"checkpoint {self._store.where(optimizer_step)} could not be written"
        try:
            write_checkpoint(self._store, optimizer_step, files, loss=loss, on_phase=self._on_phase)
            doing = f"checkpoint {self._store.where(optimizer_step)} is written, but an older one could not be removed"
            prune(self._store, keep_last=self._keep.last, keep_best=self._keep.best, on_phase=self._on_phase)
        except Exception as error:  # raised on the loop's thread, at its next step
            self._error = self._explain(doing, error)
            # A note, not a cause: whoever looks for the root of a failure shall find this error, which ends the run.
            self._error.add_note("".join(traceback.format_exception(error)))
            if on_failure is not None:
                on_failure()

    def _explain(self, doing: str, error: Exception) -> RunStoppedError:
        number = error_number(error)
        reason = os.strerror(number) if number is not None else _in_words(error)
        remedy = REMEDIES.get(number, "mend it") if number is not None else "mend it"
        return RunStoppedError(f"{doing}: {reason}; {self._last_good()}; {remedy}, then start the same command again")

    def _last_good(self) -> str:
        try:
            steps = self._store.steps()
        except Exception:  # the store may be what is broken
            return "earlier ones are as they were"
        return f"the last good one is of step {steps[-1]}" if steps else "there is no earlier one"


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())
    is_message = text and isinstance(error, (OSError, RuntimeError, ValueError))
    return text if is_message else f"{type(error).__name__}: {text or 'no message'}"


def error_number(error: BaseException) -> int | None:
    """The system's number of an error; safetensors keeps it in its text only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None
