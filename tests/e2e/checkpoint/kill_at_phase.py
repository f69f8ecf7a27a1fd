"""Saves step 1 and then step 2, keeping one, in a process that ends itself with SIGKILL at a phase of the second save.

A process that finds a checkpoint already there writes only what comes after it.
"""

import multiprocessing
import os
import signal
from pathlib import Path

from vlatune.checkpoint.store import find_newest, open_store, prune, write_checkpoint

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["s3fs", "botocore.session", "e2e.checkpoint.kill_at_phase", "vlatune.checkpoint.store"])


def save_twice(run_dir: Path, storage_path: str | None, *, kill_at: tuple[str, int] | None) -> int | None:
    """The exit code of a process that saves; `kill_at` is a phase and how many times it is met before the end."""
    process = _server.Process(target=_save, args=(run_dir, storage_path, kill_at, dict(os.environ)), daemon=True)
    process.start()
    process.join(300)
    return process.exitcode


def content(step: int) -> bytes:
    return b"%d" % step * 1000


def _save(run_dir: Path, storage_path: str | None, kill_at: tuple[str, int] | None, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    store = open_store(run_dir, storage_path)
    done = find_newest(store, warn=print) or 0
    store.clean()
    phase, left = kill_at or ("", 0)

    def on_phase(name: str) -> None:
        nonlocal left
        left -= name == phase
        if name == phase and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(done + 1, 3):
        watch = on_phase if step == 2 else lambda _: None
        files = {name: lambda path, step=step: path.write_bytes(content(step)) for name in ("a.bin", "weights.bin")}
        write_checkpoint(store, step, files, on_phase=watch)
        prune(store, keep_last=1, on_phase=watch)
    prune(store, keep_last=1)
