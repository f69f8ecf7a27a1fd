"""Checkpoints in a folder of this machine, or of a filesystem that all machines share.

    checkpoints/00000500/            a checkpoint: visible only when it is whole
    checkpoints/.writing-00001000/   being written; what a killed process leaves here is ignored and cleaned
    checkpoints/.removing-00000000/  being deleted

One rename makes a checkpoint visible and one makes it invisible, so there is never half of one.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlatune.checkpoint.manifest import Manifest, OnPhase, find_problem, read_manifest
from vlatune.files import put_folder, read_file, refuse_link

ASIDE, REMOVING = ".writing-", ".removing-"


def folder_name(optimizer_step: int) -> str:
    return f"{optimizer_step:08d}"


class LocalStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def where(self, optimizer_step: int) -> str:
        return str(self.path(optimizer_step))

    def path(self, optimizer_step: int) -> Path:
        return self.folder / folder_name(optimizer_step)

    def steps(self) -> list[int]:
        """Optimizer steps of the checkpoints, oldest first."""
        refuse_link(self.folder)  # what is older is deleted: only in the run's own folder
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.glob("[0-9]*") if path.is_dir() and not path.is_symlink()]
        return sorted(int(name) for name in names if name.isdecimal() and name == folder_name(int(name)))

    def manifest(self, optimizer_step: int) -> Manifest:
        return read_manifest(self.path(optimizer_step))

    def problem(self, optimizer_step: int) -> str | None:
        return find_problem(self.path(optimizer_step))

    def read_bytes(self, optimizer_step: int, name: str) -> bytes:
        return read_file(self.path(optimizer_step), name)

    @contextmanager
    def opened(self, optimizer_step: int) -> Iterator[Path]:
        """A folder with the checkpoint's files: the checkpoint itself."""
        yield self.path(optimizer_step)

    def begin(self, optimizer_step: int) -> Path:
        """An empty folder in which to write, on the filesystem of the checkpoints."""
        refuse_link(self.folder)
        aside = self.folder / f"{ASIDE}{folder_name(optimizer_step)}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def commit(self, optimizer_step: int, aside: Path, on_phase: OnPhase) -> None:
        """Make what was written the checkpoint of this step.

        A whole one that is already there stays: it was written by this run at this step, and replacing it would
        leave a moment without any.
        """
        del on_phase  # one rename has no moments in between
        final = self.path(optimizer_step)
        if final.exists():
            if find_problem(final) is None:
                shutil.rmtree(aside)
                return
            shutil.rmtree(final)
        put_folder(aside, final)

    def remove(self, optimizer_step: int, on_phase: OnPhase) -> None:
        going = self.folder / f"{REMOVING}{folder_name(optimizer_step)}"
        shutil.rmtree(going, ignore_errors=True)
        put_folder(self.path(optimizer_step), going)
        on_phase("removing")
        shutil.rmtree(going)

    def clean(self) -> None:
        """Remove what interrupted writers and removers left; only one process may write here."""
        refuse_link(self.folder)
        for prefix in (ASIDE, REMOVING):
            for leftover in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def check_writable(self) -> None:
        """Refuse a place where no checkpoint could be written, before a run has cost anything."""
        try:
            probe = self.begin(0)
            (probe / "probe").write_bytes(b"vlatune")
            shutil.rmtree(probe)
        except OSError as error:
            raise ValueError(
                f"checkpoints cannot be written to '{self.folder}' ({error.strerror}); choose another --output_dir or --storage_path"
            ) from None
