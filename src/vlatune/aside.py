"""Files and folders that are whole or not there: written aside, synced, renamed.

What a killed writer leaves aside is removed by the next one that writes the same thing.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """A reader sees the old file or the new one, whatever happens."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        with aside.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)  # the rename itself


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` (missing or empty) at the end and is gone if anything comes between.

    Who wants its files to outlive a power cut, too, syncs them.
    """
    _remove_leftovers(folder)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """What writers of `folder` left aside that were killed; one that is alive keeps its own."""
    for left in folder.parent.glob(".*.partial"):
        name, _, pid = left.name.removesuffix(".partial").rpartition(".")
        if name == f".{folder.name}" and pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def sync(path: Path) -> None:
    """A file's bytes, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True
