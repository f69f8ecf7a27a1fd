"""Bring the records of a run from rank 0 to the driver, which writes the run folder. No Ray.

    rank 0: Mailbox  ->  monitor actor: Mailbox  ->  driver: RunWriter

Records are numbered from 0 in each attempt. Rank 0 keeps a record until the driver has written it,
so none is lost if the monitor is restarted or the driver polls late. The receivers drop what they
have already, and what does not follow it.
"""

import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlatune.errors import RunStoppedError
from vlatune.run.mirror import HOLD_S, Mirror
from vlatune.run.run_folder import (
    EVENTS_FILE,
    LOGS,
    METRICS_FILE,
    SAMPLES_FILE,
    VALIDATIONS_FILE,
    read_validation_errors,
)
from vlatune.run.sinks import MetricsFile, read_jsonl
from vlatune.run.summary import Summary, write_summary
from vlatune.storage.files import make_folder, open_to_append
from vlatune.storage.paths import SUMMARY_FILE

Record = tuple[str, dict[str, Any]]
"""(file in the run folder, JSON object)"""
Parcel = tuple[int, Sequence[Record]]
"""(number of the first record, records)"""
WORKER_LOG = f"{LOGS}/worker.log"
MAX_PARCEL = 64
"""Maximum number of records in one message; a record of samples has a few KB."""


class Mailbox:
    """Records that the driver has not written yet, as known to rank 0 or to the monitor."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        """Number of records that the driver has written."""
        self._records: list[Record] = []
        self._changed = threading.Condition()

    @property
    def end(self) -> int:
        """Return the number of the next record."""
        with self._changed:
            return self.begin + len(self._records)

    def append(self, record: Record) -> None:
        with self._changed:
            self._records.append(record)

    def put(self, parcel: Parcel) -> None:
        """Add the records that are new; drop them if earlier ones are missing."""
        with self._changed:
            self._records += new_records(parcel, self.end)

    def parcel(self, wanted: int = 0) -> Parcel:
        """Return records from number `wanted` on, or from the first one that is still here."""
        with self._changed:
            skipped = max(0, wanted - self.begin)
            return self.begin + skipped, tuple(self._records[skipped : skipped + MAX_PARCEL])

    def acknowledge(self, received: int) -> None:
        """Drop the records before number `received`, which the driver has written."""
        with self._changed:
            del self._records[: max(0, received - self.begin)]
            self.begin = max(self.begin, received)
            self._changed.notify_all()

    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait until all records before `number` are written; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.begin >= number, timeout_s)


def new_records(parcel: Parcel, end: int) -> Sequence[Record]:
    """Return the records from number `end` on; empty if earlier ones are missing."""
    first, records = parcel
    return records[end - first :] if first <= end else ()


@dataclass(frozen=True)
class Recorded:
    """Records of the run folder up to the checkpoint that an attempt resumes from."""

    last_loss: float = float("nan")
    validation_errors: dict[int, float] = field(default_factory=dict)
    """Optimizer step -> action error."""


class RunWriter:
    """Writes the records of one attempt to the run folder, without those after its checkpoint."""

    def __init__(self, folder: Path, first_step: int, mirror: Mirror | None = None, *, log_samples: bool) -> None:
        self._mirror = mirror
        self._held = (sys.maxsize, 0, 0.0)
        """First record that waits for a copy to the mirror, number of the copy, and when it was requested."""
        self.received = 0
        """Number of records written in this attempt."""
        self._folder, self._open = folder, ExitStack()
        self._files: dict[str, MetricsFile] = {}
        for name in (METRICS_FILE, VALIDATIONS_FILE, *([SAMPLES_FILE] if log_samples else []), EVENTS_FILE):
            file = self._files[name] = MetricsFile(folder / name)
            self._open.callback(lambda file=file: file.close())
            if name != EVENTS_FILE:  # failed starts are recorded, too
                file.keep_until(first_step)
        metrics = read_jsonl(folder / METRICS_FILE)
        last_loss = metrics[-1]["loss"] if metrics else float("nan")
        self.recorded = Recorded(last_loss, read_validation_errors(folder))

    @property
    def acknowledged(self) -> int:
        """Return the number of records that rank 0 may drop; those before a checkpoint wait for the mirror."""
        first, copy, asked_s = self._held
        if self._mirror and not self._mirror.is_done(copy) and time.monotonic() < asked_s + HOLD_S:
            return min(first, self.received)
        self._held = (sys.maxsize, 0, 0.0)
        return self.received

    def write(self, parcel: Parcel) -> None:
        """Write the records that are new."""
        try:
            for name, record in new_records(parcel, self.received):
                self._write(name, record)
                self.received += 1
        except OSError as error:
            raise RunStoppedError(
                f"run folder '{self._folder}' cannot be written ({error.strerror}); free space or fix its permissions, "
                f"then start the same command again to resume"
            ) from error

    def _write(self, name: str, record: dict[str, Any]) -> None:
        if name == SUMMARY_FILE:
            write_summary(self._folder, Summary(**record))
        elif name == WORKER_LOG:
            with open_to_append(make_folder(self._folder, LOGS) / "worker.log") as file:
                file.write(f"performance flags: {', '.join(f'{flag} {value}' for flag, value in record.items())}\n")
        else:
            self._files[name].append(record)
        if name == EVENTS_FILE and self._mirror:  # each checkpoint is preceded by an event
            self._held = (min(self._held[0], self.received), self._mirror.request(), time.monotonic())

    def close(self) -> None:
        self._open.close()
