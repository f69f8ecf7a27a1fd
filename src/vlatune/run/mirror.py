"""Mirror of a run folder below --storage_path: the run can be resumed and read from any machine.

    s3://bucket/runs/NAME/    config.json, metrics.jsonl, ..., logs/; beside them checkpoints/
    s3://bucket/runs/bases/   base models that are folders of the driver, by content

A thread of the driver uploads the files that changed. A checkpoint is committed after a copy of the
records before it, so a run that loses the driver's disk resumes without gaps in its metrics. If the
store cannot be reached, the run continues, and the next copy includes everything.
"""

import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO

from vlatune.checkpoint.store import CHECKPOINTS, storage_root
from vlatune.console import warn
from vlatune.errors import RunStoppedError
from vlatune.run.run_folder import (
    CONFIG_FILE,
    DRIVER_LOCK,
    EVENTS_FILE,
    LOGS,
    RUN_ENTRIES,
)
from vlatune.storage.files import make_folder, read_file, write_atomic
from vlatune.storage.limits import check_limit
from vlatune.storage.paths import is_local, run_url
from vlatune.storage.remote_retry import retried
from vlatune.storage.root import Root
from vlatune.storage.url_folder import CHUNK_BYTES, upload_file

COPY_S, MAX_TIME_SHARE = 30.0, 0.1
"""Seconds between copies, and the maximum share of the time that they take."""
HOLD_S = 60.0
"""Maximum seconds that a checkpoint waits for a copy."""
END_S = 20.0
"""Maximum seconds for the last copy."""
BASES = "bases"
FILES = {
    "": tuple(name for name in RUN_ENTRIES if name not in (LOGS, CHECKPOINTS, DRIVER_LOCK)),
    LOGS: ("*.txt", "*.log", "*.json"),
    f"{LOGS}/tensorboard": ("events.*",),
}
"""Folder -> patterns of the mirrored names."""


def base_url(storage_path: str, content: str) -> str:
    """Return where the base model of a run is, if it was a folder of the driver."""
    return f"{storage_path.rstrip('/')}/{BASES}/{content}"


class Mirror:
    """Copies a run folder to a URL; `check` raises RunStoppedError if another driver has the run."""

    def __init__(self, folder: Path, root: Root, check: Callable[[], object]) -> None:
        self._folder, self._root, self._check = folder, root, check
        self._copied: dict[str, tuple[int, ...]] | None = None
        """Inode, time and size of each file in the store; empty if unknown, None before the first copy."""
        self._changed = threading.Condition()
        self._asked, self._done, self._is_ending = 0, 0, False
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def request(self) -> int:
        """Request a copy of what is written so far; return its number for `is_done`."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            return self._asked

    def is_done(self, number: int) -> bool:
        """True if the copy was made, or has failed."""
        return self._done >= number or not self._thread.is_alive()

    def close(self) -> None:
        """Make the last copy."""
        self._is_ending = True
        self.request()
        self._thread.join(END_S)
        if self._thread.is_alive():
            warn(f"vlatune: warning: run folder '{self._folder}' is not completely copied to '{self._root.url}'")

    def _run(self) -> None:
        pause_s, is_last = 0.0, False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done, pause_s)
                number, is_last = self._asked, self._is_ending
            begin_s = time.monotonic()
            try:
                self._copy()
                self._problem = ""
            except RunStoppedError:  # the run ends with this error
                return
            except Exception as error:  # the next copy includes what this one lacks
                remedy = "the files are only here" if is_last else "trying again while the run continues"
                if is_last or not self._problem:
                    warn(f"vlatune: warning: run folder cannot be copied to '{self._root.url}' ({error}); {remedy}")
                self._problem = str(error)
            pause_s = max(COPY_S, (time.monotonic() - begin_s) / MAX_TIME_SHARE)
            with self._changed:
                self._done = number

    def _copy(self) -> None:
        self._check()
        if self._copied is None:
            self._copied = dict.fromkeys(list_mirror(self._root), ())
        found, fs = dict(_local_files(self._folder)), self._root.filesystem()
        for name in self._copied.keys() - found.keys():  # e.g. the summary of a run that was resumed
            full = self._root.join(name)
            with suppress(FileNotFoundError):
                retried(lambda full=full: fs.rm_file(full), f"'{self._root.url}/{name}'")
            del self._copied[name]
        for name in sorted(found, key=_config_last):
            if self._copied.get(name) != found[name]:
                upload_file(self._folder / name, self._root, name)
                self._copied[name] = found[name]


@contextmanager
def mirrored(run_dir: Path, storage_path: str | None, check: Callable[[], object]) -> Iterator[Mirror | None]:
    """Mirror the run folder during the context, if --storage_path is a URL."""
    if storage_path is None or is_local(storage_path):
        yield None
        return
    mirror = Mirror(run_dir, storage_root(run_url(run_dir, storage_path)), check)
    try:
        yield mirror
    finally:
        mirror.close()


def restore(run_dir: Path, root: Root, check: Callable[[Path], object]) -> bool:
    """Restore a run folder that is missing, or that another machine has continued; return whether it was.

    `check` gets the mirrored folder before anything is changed.
    """
    if CONFIG_FILE not in root.entries():
        return False
    if (run_dir / CONFIG_FILE).exists():
        events, _, _ = _read_events(root).rpartition(b"\n")
        own = read_file(run_dir, EVENTS_FILE) if (run_dir / EVENTS_FILE).exists() else b""
        if own.startswith(events):  # each start adds an event, so another machine's differ
            return False
    with tempfile.TemporaryDirectory(prefix="vlatune-restore-") as temporary:
        names = fetch(root, Path(temporary))
        check(Path(temporary))
        for name in sorted(names, key=_config_last):
            make_folder(run_dir, str(Path(name).parent))
            with (Path(temporary) / name).open("rb") as file:
                write_atomic(run_dir / name, _chunks(file))
    return True


def list_mirror(root: Root) -> dict[str, int]:
    """Return the sizes of the mirrored files by name."""
    sizes = {}
    for folder in FILES:
        for name, size in root.entries(folder).items():
            if size is not None and name.isprintable() and _is_mirrored(folder, name):
                sizes[f"{folder}/{name}" if folder else name] = size
    return sizes


def _local_files(run_dir: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for folder in FILES:
        for entry in os.scandir(run_dir / folder) if (run_dir / folder).is_dir() else ():
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) and _is_mirrored(folder, entry.name):
                name = f"{folder}/{entry.name}" if folder else entry.name
                yield name, (found.st_ino, found.st_mtime_ns, found.st_size)


def _is_mirrored(folder: str, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in FILES[folder])


def _config_last(name: str) -> tuple[bool, bool, str]:
    """Sort names so that config.json marks a complete copy, and events.jsonl a current one."""
    return name == CONFIG_FILE, name == EVENTS_FILE, name


def fetch(root: Root, folder: Path, skip: Collection[str] = ()) -> list[str]:
    """Download the mirrored files whose names do not match `skip`; return the names."""
    sizes = {name: size for name, size in list_mirror(root).items() if not any(fnmatchcase(name, one) for one in skip)}
    check_limit("listed_files", len(sizes), f"'{root.url}' has files:")
    check_limit("run_bytes", sum(sizes.values()), f"'{root.url}' has bytes:")
    for name, size in sizes.items():
        make_folder(folder, str(Path(name).parent))
        with root.open_unverified(name) as source, (folder / name).open("wb") as into:
            for chunk in _chunks(source):
                into.write(chunk)
                check_limit("run_bytes", into.tell() + sum(sizes.values()) - size, f"'{root.url}' has bytes:")
    return list(sizes)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _read_events(root: Root) -> bytes:
    return root.read_bytes(EVENTS_FILE) if root.exists(EVENTS_FILE) else b""
