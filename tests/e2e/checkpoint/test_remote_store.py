"""Checkpoints in an object store, and saves that are killed: faults of store, network and process leave the last good one."""

import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from e2e.checkpoint.kill_at_phase import content, save_twice
from safetensors.numpy import load_file, save_file
from unit.checkpoint.upload_server import environment, running_upload_server
from unit.storage.loopback_s3 import BUCKET, Fault, Proxy, put

from vlatune.checkpoint.local_store import MANIFEST, NO_SCORE, PHASES, LocalStore, Score, Store
from vlatune.checkpoint.snapshot import BackgroundWriter, Keep
from vlatune.checkpoint.store import RemoteStore, find_newest, open_store, write_checkpoint
from vlatune.errors import RunStoppedError
from vlatune.storage import remote_file, remote_retry

WEIGHTS = np.arange(30_000, dtype=np.float32)
FILE = "trainable.safetensors"


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with running_upload_server() as proxy:
        yield proxy


@pytest.fixture
def s3(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The server without faults, short pauses, no cached bytes, and the user's environment."""
    monkeypatch.setattr(remote_retry, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(remote_retry, "MAX_TRIES", 3)
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    server.reset()
    remote_file.cache.clear()
    yield server
    server.reset()


@pytest.fixture
def store(s3: Proxy, tmp_path: Path) -> RemoteStore:
    run_dir = tmp_path / tmp_path.name
    run_dir.mkdir()
    found = open_store(run_dir, f"s3://{BUCKET}/runs")
    assert isinstance(found, RemoteStore)
    return found


def files(weights: np.ndarray = WEIGHTS):
    return {
        FILE: lambda path: save_file({"weights": weights}, path),
        "policy/config.json": lambda path: path.write_text("{}"),
    }


def key(store: RemoteStore, name: str) -> str:
    return f"{store.root.url.removeprefix(f's3://{BUCKET}/')}/{name}"


def test_round_trip_with_the_manifest_last(store, s3):
    write_checkpoint(store, 5, files(), score=Score(loss=0.5))
    sent = [one.target.partition("?")[0] for one in s3.seen if one.method in ("PUT", "POST")]
    assert len(sent) == 3
    assert sent[-1].endswith(f"00000005/{MANIFEST}")
    assert find_newest(store, warn=pytest.fail) == 5
    assert store.manifest(5).score.loss == 0.5
    with store.opened(5) as folder:
        assert (load_file(folder / FILE)["weights"] == WEIGHTS).all()
        assert (folder / "policy" / "config.json").read_text() == "{}"
    assert not folder.exists()
    assert list(store.staging.iterdir()) == []


def test_processes_of_a_machine_share_one_copy(store, s3, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_checkpoint(store, 5, files())
    s3.reset()
    copies: list[Path] = []
    threads = [threading.Thread(target=lambda: copies.append(store.local_copy(5))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (copy,) = set(copies)
    assert len(copies) == 3
    assert (load_file(copy / FILE)["weights"] == WEIGHTS).all()
    assert len(s3.gets(FILE)) == 1
    store.drop_copy(copy)
    put(s3, key(store, f"00000005/{FILE}"), bytes(100))
    with pytest.raises(RuntimeError, match="is damaged"):
        store.local_copy(5)
    assert not copy.exists()


def test_what_need_not_be_kept_goes_after_the_new_one_is_there(store, s3):
    writer = BackgroundWriter(store, Keep(last=1))
    for step in (1, 2):
        writer.save(step, files(), score=NO_SCORE)
    writer.wait()
    assert store.steps() == [2]
    order = [(one.method, one.target.partition("?")[0]) for one in s3.seen]
    committed = order.index(("PUT", f"/{BUCKET}/{key(store, f'00000002/{MANIFEST}')}"))
    removed = order.index(("DELETE", f"/{BUCKET}/{key(store, f'00000001/{MANIFEST}')}"))
    assert committed < removed
    assert store.root.glob("00000001/*") == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damage_is_detected_and_an_earlier_checkpoint_is_taken(store, s3, damage):
    for step in (5, 10):
        write_checkpoint(store, step, files())
    name = MANIFEST if damage == "manifest" else FILE
    data = bytearray(store.read_bytes(10, name))
    data[len(data) // 2] ^= 1
    if damage == "remove":
        store.root.filesystem().rm_file(store.root.join(f"00000010/{name}"))
    else:
        whole = {"flip": bytes(data), "truncate": bytes(data[:-1]), "manifest": bytes(data[:50])}
        put(s3, key(store, f"00000010/{name}"), whole[damage])
    warnings: list[str] = []
    assert find_newest(store, warn=warnings.append) == 5
    assert len(warnings) == 1
    assert f"{store.where(10)} is DAMAGED" in warnings[0]


def test_an_upload_that_broke_off_is_ignored_and_cleaned(store, s3):
    write_checkpoint(store, 5, files())
    put(s3, key(store, f"00000010/{FILE}"), b"half")
    assert store.steps() == [5]
    BackgroundWriter(store, Keep(last=1))
    assert store.root.glob("*") == ["00000005"]


@pytest.mark.parametrize("kind", ["503", "500", "reset", "hang"])
def test_a_fault_that_passes_is_not_noticed(store, s3, kind, monkeypatch):
    monkeypatch.setattr("vlatune.storage.url_folder.UPLOAD_GRACE_S", 1.0)
    writer = BackgroundWriter(store, Keep(last=1))
    s3.faults.append(Fault(kind, times=1, method="PUT", part=FILE))
    writer.save(5, files(), score=NO_SCORE)
    writer.wait()
    assert s3.faults[0].times == 0
    assert find_newest(store, warn=pytest.fail) == 5


@pytest.mark.parametrize("kind", ["503", "403", "hang", "deaf"])
@pytest.mark.parametrize("part", [FILE, MANIFEST])
def test_a_fault_that_stays_ends_the_run_and_the_last_good_one_loads(store, s3, kind, part, monkeypatch):
    monkeypatch.setattr("vlatune.storage.url_folder.UPLOAD_GRACE_S", 0.2)
    writer = BackgroundWriter(store, Keep(last=1))
    writer.save(5, files(), score=NO_SCORE)
    writer.wait()
    s3.faults.append(Fault(kind, times=-1, method="PUT", part=f"00000010/{part}"))
    writer.save(10, files(WEIGHTS + 1), score=NO_SCORE)
    reason = "access denied" if kind == "403" else "gave up after"
    with pytest.raises(
        RunStoppedError, match=rf"{store.where(10)} could not be written: .*{reason}.*of step 5"
    ) as error:
        writer.wait()
    assert f"00000010/{part}" in str(error.value)
    s3.reset()
    assert find_newest(store, warn=pytest.fail) == 5
    with store.opened(5) as folder:
        assert (load_file(folder / FILE)["weights"] == WEIGHTS).all()


def test_a_bucket_that_may_not_be_written_is_found_at_the_start(store, s3):
    store.check_writable()
    assert store.root.glob("*") == []
    s3.faults.append(Fault("403", times=-1, method="PUT"))
    with pytest.raises(ValueError, match=r"checkpoints cannot be written to .*access denied.*--storage_path"):
        store.check_writable()


def check_killed_save(store: Store, run_dir: Path, storage_path: str | None, kill_at: tuple[str, int]) -> None:
    """Kill the second save in another process; one valid checkpoint is there, and the next save completes."""
    assert save_twice(run_dir, storage_path, kill_at=kill_at) == -signal.SIGKILL
    found = find_newest(store, warn=pytest.fail) or 0
    assert found == (2 if PHASES.index(kill_at[0]) >= PHASES.index("committed") else 1)
    assert store.read_bytes(found, "weights.bin") == content(found)
    assert save_twice(run_dir, storage_path, kill_at=None) == 0
    assert store.steps() == [2]


@pytest.mark.parametrize("kill_at", [("uploading", 2), ("uploaded", 1), ("committed", 1), ("removing", 1)])
def test_killed_at_any_phase_one_valid_checkpoint_is_there(store, kill_at):
    check_killed_save(store, store.staging.parent, f"s3://{BUCKET}/runs", kill_at)
    assert store.root.glob("*") == ["00000002"]
    assert list(store.staging.iterdir()) == []


LOCAL = [phase for phase in PHASES if phase not in ("uploading", "uploaded")]


@pytest.mark.parametrize("kill_at", [("file", 2), *((phase, 1) for phase in LOCAL)])
def test_killed_at_any_phase_one_valid_local_checkpoint_is_there(tmp_path, kill_at):
    store = LocalStore(tmp_path / "checkpoints")
    check_killed_save(store, tmp_path, None, kill_at)
    assert [path.name for path in store.staging.iterdir()] == ["00000002"]
