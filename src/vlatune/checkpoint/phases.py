"""The moments of a save, by name, so that a test can end the process at any of them.

begun       an empty folder lies aside
file        one of its files is written (once per file)
written     all of them are
synced      and are on the disk, with their manifest
uploading   an object is about to be sent (object stores; once per object)
uploaded    all objects but the manifest are there (object stores)
committed   the checkpoint is visible: from here on it is the newest
removing    an older one is no longer visible, its files still there
pruned      what need not be kept is gone
"""

from collections.abc import Callable

PHASES = ("begun", "file", "written", "synced", "uploading", "uploaded", "committed", "removing", "pruned")
OnPhase = Callable[[str], None]


def no_phase(_: str) -> None:
    """What a save calls when nobody watches."""
