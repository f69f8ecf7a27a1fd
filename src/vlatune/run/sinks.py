"""Write and read the JSON-lines files of a run, which the terminal, trackers and report follow.

A killed process may leave an incomplete last line; the reader skips it, and the writer removes it
before appending. On resume `keep_until` drops records after the checkpoint, so that no optimizer
step is recorded twice. Non-finite numbers are rejected: JSON cannot represent them, and a diverged
run should stop.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlatune.storage.files import MAX_LINES_BYTES, open_file, open_to_append, require_finite, write_atomic
from vlatune.storage.limits import check_limit, limit


class MetricsFile:
    """Append one JSON object with an `optimizer_step` per line (metrics.jsonl, samples.jsonl)."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_to_append(self.path)
        self.keep_until(sys.maxsize)

    def append(self, record: dict[str, Any]) -> None:
        require_finite(record, self.path.name)
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def keep_until(self, optimizer_step: int) -> None:
        """Drop all lines after this optimizer step, from which the run resumes, and an incomplete last line."""
        self._file.close()
        kept = (line for line, record in _lines(self.path) if record["optimizer_step"] <= optimizer_step)
        write_atomic(self.path, (line.rstrip(b"\n") + b"\n" for line in kept))
        self._file = open_to_append(self.path)

    def close(self) -> None:
        self._file.close()


class JsonlTail:
    """Follow a file that another process writes, from its beginning or its current end."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        stat = path.stat() if from_end and path.exists() else None
        self._inode, self._offset = (stat.st_ino, stat.st_size) if stat else (0, 0)

    def read_new(self) -> list[dict[str, Any]]:
        """Return the records since the last call, or all records if the file was replaced."""
        if not self._path.exists():
            return []
        with open_file(self._path.parent, self._path.name) as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._inode or now.st_size < self._offset:
                self._inode, self._offset = now.st_ino, 0
            file.seek(self._offset)
            complete, _, _ = file.read().rpartition(b"\n")
        if not complete:
            return []
        self._offset += len(complete) + 1
        return [json.loads(line) for line in complete.splitlines()]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read all records; an incomplete last line is skipped."""
    return [record for _, record in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with open_file(path.parent, path.name, max_bytes=MAX_LINES_BYTES) as file:
        number = 0
        while line := file.readline(limit("line_bytes") + 1):
            number += 1
            check_limit("line_bytes", len(line), f"{path}: line {number} has bytes:")
            check_limit("run_records", number, f"{path} has lines:")
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    return
                raise RuntimeError(
                    f"{path}: line {number} is not JSON ({line[:60]!r}); remove the line, or restore the file"
                ) from None
            if not isinstance(record, dict) or type(record.get("optimizer_step")) is not int:
                raise RuntimeError(
                    f"{path}: line {number} has no optimizer_step ({line[:60]!r}); remove the line, or restore the file"
                )
            yield line, record
