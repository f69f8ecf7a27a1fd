"""Saving in the background: one at a time, and a failure is raised at the next step with its cause and remedy."""

import errno
import os
import pickle
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vlatune.checkpoint.local_store import NO_SCORE, LocalStore
from vlatune.checkpoint.snapshot import BackgroundWriter, Keep
from vlatune.checkpoint.store import find_newest
from vlatune.errors import RunStoppedError
from vlatune.train.failures import root_cause

SMALL = np.zeros(1000, dtype=np.float32)
BIG = np.zeros(2_000_000, dtype=np.float32)


def tensors(values: np.ndarray):
    return {"trainable.safetensors": lambda path: save_file({"weights": values}, path)}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "checkpoints")


def test_at_most_one_save_is_in_flight_and_the_loop_continues(store):
    go_on, events = threading.Event(), []

    def slow(path: Path) -> None:
        events.append(f"begin {path.parent.name}")
        assert go_on.wait(30)
        path.write_bytes(b"weights")
        events.append(f"end {path.parent.name}")

    writer = BackgroundWriter(store, Keep(last=3))
    writer.save(1, {"weights.bin": slow}, score=NO_SCORE)
    writer.check()  # the loop is here, and the save cannot be done
    assert store.steps() == []
    threading.Timer(0.01, go_on.set).start()
    writer.save(2, {"weights.bin": slow}, score=NO_SCORE)  # waits for the first
    assert 1 in store.steps()
    writer.wait()
    first, second = ".writing-00000001", ".writing-00000002"
    assert events == [f"begin {first}", f"end {first}", f"begin {second}", f"end {second}"]


def test_a_failed_save_is_raised_at_the_next_step_and_every_later_one(store):
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    writer = BackgroundWriter(store, Keep(last=1))
    writer.save(1, tensors(SMALL), score=NO_SCORE)
    writer.save(2, {"weights.bin": fail}, score=NO_SCORE)
    writer.join()
    expected = (
        r"00000002 could not be written: No space left on device; the last good one is of step 1; free some space"
    )
    for surfaces in (writer.check, writer.wait, lambda: writer.save(3, tensors(SMALL), score=NO_SCORE)):
        with pytest.raises(RunStoppedError, match=expected):
            surfaces()
    assert find_newest(store, warn=pytest.fail) == 1


def test_the_failure_reaches_the_driver_complete(store):
    def fail(path: Path) -> None:
        raise RuntimeError("gave up after 8 tries")  # as the retries of an object store end

    writer = BackgroundWriter(store, Keep(last=1))
    writer.save(1, {"weights.bin": fail}, score=NO_SCORE)
    writer.join()
    with pytest.raises(RunStoppedError) as found:
        writer.check()
    arrived = pickle.loads(pickle.dumps(found.value))  # noqa: S301 (our own)
    assert root_cause(arrived) is arrived  # not the inner one, which would be tried again
    assert "gave up after 8 tries; there is no earlier one; fix the cause, then start the same command" in str(arrived)
    assert "in fail" in arrived.__notes__[0]


def test_an_old_checkpoint_that_cannot_be_removed_is_reported(store, monkeypatch):
    writer = BackgroundWriter(store, Keep(last=1))
    writer.save(1, tensors(SMALL), score=NO_SCORE)
    writer.wait()

    def fail_to_remove(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(store, "remove", fail_to_remove)
    writer.save(2, tensors(SMALL), score=NO_SCORE)
    with pytest.raises(RunStoppedError, match="00000002 is written, but an older one could not be removed: Permission"):
        writer.wait()
    assert store.steps() == [1, 2]


def test_time_is_counted_from_the_last_save(store):
    now = [0.0]
    writer = BackgroundWriter(store, Keep(last=1), every_s=10, clock=lambda: now[0])
    assert not writer.is_due()
    now[0] = 10.0
    assert writer.is_due()
    writer.save(1, tensors(SMALL), score=NO_SCORE)
    assert not writer.is_due()
    writer.wait()
    assert not BackgroundWriter(store, Keep(last=1), every_s=0, clock=lambda: 1e9).is_due()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 6 MB."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_ends_the_run_and_the_last_good_one_loads(small_disk):
    store = LocalStore(small_disk / "checkpoints")
    writer = BackgroundWriter(store, Keep(last=1))
    writer.save(1, tensors(SMALL), score=NO_SCORE)
    writer.save(2, tensors(BIG), score=NO_SCORE)
    with pytest.raises(
        RunStoppedError, match="No space left on device; the last good one is of step 1; free some space"
    ):
        writer.wait()
    assert find_newest(store, warn=pytest.fail) == 1
    assert [path.name for path in store.staging.iterdir()] == ["00000001"]  # the half-written one is out of the way


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """Make a folder that this process may read but not write; root, which may always write, changes its user."""
    uid = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = BackgroundWriter(LocalStore(folder), Keep(last=1))
        writer.save(1, tensors(SMALL), score=NO_SCORE)
        writer.wait()
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555)
        os.seteuid(uid or 65534)
        try:
            yield folder
        finally:
            os.seteuid(uid)
            folder.chmod(0o755)
            (folder / "00000001").chmod(0o755)


def test_a_folder_without_permission_ends_the_run_and_is_found_at_the_start(as_nobody):
    store = LocalStore(as_nobody)
    with pytest.raises(ValueError, match=r"cannot be written to .*Permission denied.*--storage_path"):
        store.check_writable()
    writer = BackgroundWriter(store, Keep(last=1))
    writer.save(2, tensors(SMALL), score=NO_SCORE)
    with pytest.raises(RunStoppedError, match="Permission denied; the last good one is of step 1; give this user"):
        writer.wait()
    assert find_newest(store, warn=pytest.fail) == 1
