"""Where a run's numbers go: JSON lines, which everything else follows (`JsonlTail`): the terminal, trackers, the report.

A JSON-lines file may lose its last line to a kill at the wrong moment; the reader skips that one line, and the writer
cuts it before it appends. On resume `keep_until` forgets what the checkpoint does not know, so that no optimizer step is
recorded twice. Numbers that are not finite are refused: JSON has no word for them, and a diverged run should stop, not log.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlatune.files import MAX_LINES_BYTES, open_file, open_to_append, open_to_change, require_finite, write_aside
from vlatune.limits import check_limit, limit


class MetricsFile:
    """Appends one JSON object per line; each has an `optimizer_step` (metrics.jsonl, samples.jsonl)."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _end_with_whole_line(self.path)
        self._file = open_to_append(self.path)

    def append(self, record: dict[str, Any]) -> None:
        require_finite(record, self.path.name)
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def keep_until(self, optimizer_step: int) -> None:
        """Drop every line after this optimizer step: the run continues from its checkpoint."""
        self._file.close()
        kept = (line for line, record in _lines(self.path) if record["optimizer_step"] <= optimizer_step)
        write_aside(self.path, (line.rstrip(b"\n") + b"\n" for line in kept))
        self._file = open_to_append(self.path)

    def close(self) -> None:
        self._file.close()


class JsonlTail:
    """What a file gets while somebody else writes it; whole lines only. From its beginning, or from what comes after now."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        there = path.stat() if from_end and path.exists() else None
        self._inode, self._offset = (there.st_ino, there.st_size) if there else (0, 0)

    def read_new(self) -> list[dict[str, Any]]:
        """Records since the last call; after a restart that put a shorter file in its place, all of that file's."""
        if not self._path.exists():
            return []
        with open_file(self._path.parent, self._path.name) as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._inode or now.st_size < self._offset:
                self._inode, self._offset = now.st_ino, 0
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All whole records; a torn last line (the writer was killed, or is writing now) is left out."""
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
                    f"{path}: line {number} is not JSON ({line[:60]!r}); remove the line, or take the file from a backup"
                ) from None
            if not isinstance(record, dict) or type(record.get("optimizer_step")) is not int:
                raise RuntimeError(
                    f"{path}: line {number} is no record with an optimizer_step ({line[:60]!r}); remove the line, or take the file from "
                    f"a backup"
                )
            yield line, record


def _end_with_whole_line(path: Path) -> None:
    """Cut a torn last line, so that the next record starts a line of its own; a whole one only lacks its newline."""
    if not path.exists():
        return
    whole = b"\n"
    whole_bytes = 0
    for whole, _ in _lines(path):
        whole_bytes += len(whole)
    with open_to_change(path) as file:
        file.truncate(whole_bytes)
        if not whole.endswith(b"\n"):
            file.seek(whole_bytes)
            file.write(b"\n")
