"""One process at a time holds the lease of a run, in a folder, on S3 and on GCS."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import pytest
from unit.checkpoint.upload_server import running_upload_server
from unit.storage.loopback_gcs import running_gcs
from unit.storage.loopback_s3 import BUCKET, Fault, Proxy
from waiting import wait_until

from vlatune.errors import RunStoppedError
from vlatune.storage.lease import (
    EXPIRY_S,
    LEASE_FILE,
    Lease,
    LeaseFile,
    LocalLeaseFile,
    held,
    open_lease_file,
    this_process,
)
from vlatune.storage.root import Root


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with running_upload_server() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def gcs() -> Iterator[str]:
    with running_gcs() as address:
        yield address


@pytest.fixture(params=["folder", "s3", "gcs"])
def file(request, server, gcs, tmp_path) -> LeaseFile:
    if request.param == "folder":
        return open_lease_file(Root(str(tmp_path / "store/run")))
    if request.param == "gcs":
        options = {"token": "anon", "endpoint_url": gcs}
        return open_lease_file(Root(f"gs://{BUCKET}/{tmp_path.name}", storage_options=options, has_checksums=False))
    url = f"s3://{BUCKET}/{tmp_path.name}"
    return open_lease_file(Root(url, storage_options=server.storage_options(), has_checksums=False))


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_second_process_is_rejected_with_the_holder(file):
    clock = Clock()
    first, second = Lease(file, clock), Lease(file, clock)
    first.acquire()
    found = file.read()
    assert found is not None
    holder = json.loads(found[0])
    with pytest.raises(ValueError, match=rf"process {holder['pid']} on {holder['host']}, started "):
        second.acquire()
    first.check()
    first.release()
    assert file.read() is None
    second.acquire()
    with pytest.raises(RunStoppedError):
        first.check()


def test_lease_of_a_dead_process_is_taken_over_after_its_expiry(file):
    clock = Clock()
    dead, next_one, late = (Lease(file, clock) for _ in range(3))
    dead.acquire()
    clock.now_s += EXPIRY_S - 1
    dead.renew()
    clock.now_s += EXPIRY_S - 1
    with pytest.raises(ValueError, match="is in use"):
        next_one.acquire()
    clock.now_s += 2
    next_one.acquire()
    for lost in (dead.check, dead.renew):
        with pytest.raises(RunStoppedError):
            lost()
    dead.release()  # not its lease
    next_one.check()
    with pytest.raises(ValueError, match="is in use"):
        late.acquire()


def test_of_two_that_take_over_at_once_one_fails(file):
    """Both have read the expired lease before one of them writes."""
    clock = Clock()
    Lease(file, clock).acquire()
    expired = file.read()
    assert expired is not None
    assert file.write(b'{"a": 1}', expired[1])
    assert not file.write(b'{"b": 1}', expired[1])
    assert not file.write(b'{"c": 1}', None)
    found = file.read()
    assert found is not None
    assert found[0] == b'{"a": 1}'


def test_many_at_once_one_succeeds(file):
    leases, start = [Lease(file) for _ in range(6)], threading.Barrier(6)
    outcomes: list[bool] = []

    def try_it(lease: Lease) -> None:
        start.wait(60)
        try:
            lease.acquire()
            outcomes.append(True)
        except (ValueError, RunStoppedError):
            outcomes.append(False)

    threads = [threading.Thread(target=try_it, args=(lease,), daemon=True) for lease in leases]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(outcomes) == len(leases))
    assert sorted(outcomes) == [False] * 5 + [True]


def test_lease_is_renewed_while_held_and_its_loss_is_reported(file):
    with held(Lease(file), renew_s=0.01) as lease:
        first = file.read()
        assert first is not None
        wait_until(lambda: file.read() not in (None, first))
        clock = Clock()
        clock.now_s = json.loads(first[0])["renewed_s"] + 10 * EXPIRY_S
        thief = Lease(file, clock)

        def is_taken() -> bool:
            try:
                thief.acquire()
            except (ValueError, RunStoppedError):  # renewed meanwhile
                return False
            return True

        wait_until(is_taken)
        wait_until(lambda: lease.lost is not None)
    assert isinstance(lease.lost, RunStoppedError)
    thief.check()  # not removed by the one that lost it


@dataclass(frozen=True)
class FailingFile(LocalLeaseFile):
    """A store that cannot be reached as soon as `failed` is set; it answers again with `back`."""

    failed: threading.Event
    back: threading.Event

    def read(self) -> tuple[bytes, str] | None:
        if self.failed.is_set():
            self.back.wait(60)
            raise RuntimeError("gave up after 8 tries")
        return super().read()


@pytest.mark.parametrize("answers", [True, False])
def test_store_that_is_unreachable_at_the_end_does_not_fail_a_finished_run(tmp_path, answers):
    failed, back = threading.Event(), threading.Event()
    with held(Lease(FailingFile(tmp_path, failed, back)), end_s=60 if answers else 0.01) as lease:
        failed.set()
        if answers:
            back.set()
    back.set()
    assert lease.lost is None


def test_folder_without_locks_has_a_lease(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    file = open_lease_file(Root(str(tmp_path)))
    first = Lease(file)
    first.acquire()
    first.renew()
    with pytest.raises(ValueError, match="is in use"):
        Lease(file).acquire()
    first.release()
    assert file.read() is None


def test_store_without_conditional_writes_has_a_lease(server, tmp_path):
    url = f"s3://{BUCKET}/{tmp_path.name}"
    file = open_lease_file(Root(url, storage_options=server.storage_options(), has_checksums=False))
    first = Lease(file)
    for write in (first.acquire, first.renew):
        server.faults = [Fault("501", method="PUT", part=LEASE_FILE)]
        write()
        assert not server.faults[0].times
    with pytest.raises(ValueError, match="is in use"):
        Lease(file).acquire()


ACQUIRE_AND_DIE = """
import os, sys
from vlatune.storage.lease import Lease, open_lease_file
from vlatune.storage.root import Root
Lease(open_lease_file(Root(sys.argv[1]))).acquire()
os.kill(os.getpid(), 9)
"""


def test_lease_of_a_process_killed_on_this_machine_is_taken_over_at_once(tmp_path):
    subprocess.run([sys.executable, "-c", ACQUIRE_AND_DIE, str(tmp_path)], check=False, timeout=60)
    file = tmp_path / LEASE_FILE
    killed = json.loads(file.read_text())
    assert killed["pid"] != os.getpid()
    file.write_text(json.dumps(killed | {"machine": "another"}))
    with pytest.raises(ValueError, match=f"process {killed['pid']}"):
        Lease(open_lease_file(Root(str(tmp_path)))).acquire()
    file.write_text(json.dumps(killed))
    Lease(open_lease_file(Root(str(tmp_path)))).acquire()


def test_killed_process_whose_parent_has_not_waited_for_it_is_dead(tmp_path):
    """A container often has no process that waits for orphans."""
    with subprocess.Popen([sys.executable, "-c", ACQUIRE_AND_DIE, str(tmp_path)]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        Lease(open_lease_file(Root(str(tmp_path)))).acquire()


LEASE = asdict(this_process())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"host": "a"}',
        b'{"pid": 1e999}',
        *(json.dumps(LEASE | change).encode() for change in ({"pid": -1}, {"pid": 2**40}, {"started_s": 1e30})),
    ],
)
def test_damaged_lease_is_named(tmp_path, content):
    (tmp_path / LEASE_FILE).write_bytes(content)
    with pytest.raises((ValueError, RuntimeError), match=LEASE_FILE):
        Lease(open_lease_file(Root(str(tmp_path)))).acquire()
