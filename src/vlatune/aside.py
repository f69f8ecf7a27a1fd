"""Folders that are whole or not there: written aside and renamed. Single files: `write_aside` in files.py.

What a killed writer leaves aside is removed by the next one that writes the same thing.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlatune.files import sync


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` (missing or empty) at the end and is gone if anything comes between.

    Who wants its files to outlive a power cut, too, syncs them.
    """
    remove_leftovers(folder)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """What writers of `folder` left aside that were killed; one that is alive keeps its own."""
    for left in folder.parent.glob(".*.partial"):
        name, _, pid = left.name.removesuffix(".partial").rpartition(".")
        if name == f".{folder.name}" and pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True
