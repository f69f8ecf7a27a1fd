"""A lease in storage: one process at a time writes a run, from whatever machine.

The lease is a small JSON file that names its holder and the time of its last renewal. It is created
only if there is none, and replaced only if it is unchanged since it was read, so of two processes
that try at once one fails; in storage without locks or conditional writes the first one does, at its
next `check`. A lease may be taken over if it was not renewed for EXPIRY_S, or if its holder was a
process of this machine that is gone. Clocks of machines may differ: whoever lost its lease finds out
at the next `check`, so a wrong clock delays a takeover or causes one, but never lets two processes
pass the check.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import quote

import psutil

from vlatune.errors import RunStoppedError
from vlatune.storage.files import make_output_folder, open_to_append, parse_json, read_file, write_atomic
from vlatune.storage.json_types import checked
from vlatune.storage.paths import run_url
from vlatune.storage.remote_retry import retried
from vlatune.storage.root import Root

LEASE_FILE, LOCK_FILE = "lease.json", ".lease.lock"
RENEW_S, EXPIRY_S = 15.0, 90.0
END_S = 10.0
"""Maximum seconds at the end of a run to remove the lease; one that is left expires."""
MAX_BYTES = 10_000
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, e.g. NFS or Lustre with some mount options."""


@dataclass(frozen=True)
class Holder:
    host: str
    machine: str
    """Boot and process namespace: within the same, the process id shows whether the holder is alive."""
    pid: int
    started_s: float
    id: str
    renewed_s: float

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started_s))
        return f"process {self.pid} on {self.host}, started {began}"


def this_process() -> Holder:
    now_s, machine = time.time(), ""
    with suppress(OSError):  # without /proc, only the time of the last renewal counts
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
    return Holder(socket.gethostname(), machine, os.getpid(), now_s, secrets.token_hex(8), now_s)


def is_dead(pid: int) -> bool:
    """True if a process of this machine has ended, also if its parent does not know yet."""
    try:
        os.kill(pid, 0)
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except ProcessLookupError:
        return True
    except (PermissionError, psutil.Error):  # of another user
        return False


@dataclass(frozen=True)
class LocalLeaseFile:
    """A file that is replaced only if it is unchanged, under a lock."""

    folder: Path

    @property
    def where(self) -> str:
        return str(self.folder / LEASE_FILE)

    def read(self) -> tuple[bytes, str] | None:
        """Return content and version; None if there is no file."""
        with suppress(FileNotFoundError):
            data = read_file(self.folder, LEASE_FILE, max_bytes=MAX_BYTES)
            return data, hashlib.sha256(data).hexdigest()
        return None

    def write(self, data: bytes, version: str | None) -> bool:
        """Replace this version, or create the file if None; False if it has changed or exists."""
        with self._locked(version) as is_unchanged:
            if is_unchanged:
                write_atomic(self.folder / LEASE_FILE, [data])
            return is_unchanged

    def remove(self, version: str) -> None:
        with self._locked(version) as is_unchanged:
            if is_unchanged:
                (self.folder / LEASE_FILE).unlink(missing_ok=True)

    @contextmanager
    def _locked(self, version: str | None) -> Iterator[bool]:
        """Lock out other processes; yield whether the file has this version."""
        make_output_folder(self.folder)
        with open_to_append(self.folder / LOCK_FILE) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS:  # without locks, the last writer holds the lease
                    raise
            found = self.read()
            yield (found[1] if found else None) == version


@dataclass(frozen=True)
class RemoteLeaseFile:
    """An object, replaced with the conditional writes of S3 (If-Match) and GCS (ifGenerationMatch)."""

    root: Root

    @property
    def where(self) -> str:
        return f"{self.root.url}/{LEASE_FILE}"

    def read(self) -> tuple[bytes, str] | None:
        fs, path = self.root.filesystem(), self.root.join(LEASE_FILE)

        def read_once() -> tuple[bytes, str]:
            fs.invalidate_cache(self.root.path)
            info = fs.info(path)  # before the content, so that the version is never newer
            version = info.get("ETag") or info.get("generation")
            data = fs.cat_file(path, start=0, end=MAX_BYTES)
            return data, str(version) if version else hashlib.sha256(data).hexdigest()

        with suppress(FileNotFoundError):
            return retried(read_once, self.where)
        return None

    def write(self, data: bytes, version: str | None) -> bool:
        fs, path = self.root.filesystem(), self.root.join(LEASE_FILE)
        match = {"IfMatch": version} if "s3" in fs.protocol else {}
        is_renewed_on_gcs = "gs" in fs.protocol and version is not None and version.isdecimal()
        failed: Exception | None = None
        try:
            try:
                if is_renewed_on_gcs:  # pipe_file has no condition but "create"
                    bucket, key, _ = fs.split_path(path)
                    url = f"{fs.base.replace('/storage/', '/upload/storage/')}b/{quote(bucket)}/o"
                    fs.call("POST", url, uploadType="media", name=key, ifGenerationMatch=version, data=data)
                else:
                    fs.pipe_file(path, data, **({"mode": "create"} if version is None else match))
            except (NotImplementedError, TypeError, OSError) as error:
                if isinstance(error, OSError) and error.errno != errno.ENOSYS:
                    raise
                fs.pipe_file(path, data)  # without conditional writes, the last writer holds the lease
        except Exception as error:  # a conflict, or a lost answer to a write that succeeded
            failed = error
        found = self.read()
        if failed and found is None:
            raise OSError(str(failed)) from failed
        return found is not None and found[0] == data

    def remove(self, version: str) -> None:
        with suppress(OSError):  # it expires
            if (found := self.read()) and found[1] == version:
                self.root.filesystem().rm_file(self.root.join(LEASE_FILE))


LeaseFile = LocalLeaseFile | RemoteLeaseFile


def lease_file(run_dir: Path, storage_path: str) -> LeaseFile:
    """Return the lease of the run's checkpoints below `storage_path`."""
    return open_lease_file(Root(run_url(run_dir, storage_path), has_checksums=False))


def open_lease_file(root: Root) -> LeaseFile:
    return LocalLeaseFile(Path(root.path)) if root.is_local else RemoteLeaseFile(root)


class Lease:
    """The lease of this process; `now` is the wall clock."""

    def __init__(self, file: LeaseFile, now: Callable[[], float] = time.time) -> None:
        self._file, self._now = file, now
        self._own = replace(this_process(), renewed_s=now())
        self._version: str | None = None
        self.id = self._own.id
        self.lost: Exception | None = None
        """Set if another process has taken the lease over while it was `held`."""

    def acquire(self) -> None:
        """Take the lease, or raise and name the process that holds it."""
        found = self.check_free()
        self._own = replace(self._own, renewed_s=self._now())
        try:
            is_written = self._file.write(self._bytes(), found[1] if found else None)
        except OSError as error:
            raise ValueError(
                f"'{self._file.where}' cannot be written ({error}); check --storage_path and the credentials"
            ) from None
        if not is_written:
            now = self._file.read()  # another process was faster
            raise self._held_by(_parse(now[0], self._file.where) if now else self._own)
        self.check()

    def check_free(self) -> tuple[bytes, str] | None:
        """Return content and version of an expired lease, or None; raise if a process holds it."""
        found = self._file.read()
        if found is not None:
            holder = _parse(found[0], self._file.where)
            is_here = bool(self._own.machine) and holder.machine == self._own.machine
            if not (is_here and is_dead(holder.pid)) and self._now() - holder.renewed_s < EXPIRY_S:
                raise self._held_by(holder)
        return found

    def renew(self) -> None:
        """Extend the lease; raise if it was lost."""
        self.check()
        self._own = replace(self._own, renewed_s=self._now())
        self._file.write(self._bytes(), self._version)
        self.check()

    def check(self) -> None:
        """Raise if another process has taken the lease over."""
        self._version = check_lease(self._file, self.id)

    def release(self) -> None:
        """Remove the lease if this process still holds it and the store is reachable."""
        with suppress(Exception):  # it expires
            self.check()
            if self._version is not None:
                self._file.remove(self._version)

    def _held_by(self, holder: Holder) -> ValueError:
        return ValueError(
            f"'{self._file.where}': the run is in use by {holder}; wait for it, or choose another --job_name or "
            f"--storage_path (the lease of a process killed on another machine or in another container expires "
            f"{EXPIRY_S:g} s after its last renewal; remove the file if a wrong clock keeps it longer)"
        )

    def _bytes(self) -> bytes:
        return json.dumps(asdict(self._own)).encode()


def check_lease(file: LeaseFile, holder_id: str) -> str:
    """Return the version of a lease; raise if it has another holder. Call before writing to the run."""
    found = file.read()
    holder = _parse(found[0], file.where) if found else None
    if found is None or holder is None or holder.id != holder_id:
        taken = f"taken over by {holder}" if holder else "removed"
        raise RunStoppedError(f"'{file.where}': the lease of this run was {taken}; this process stops writing")
    return found[1]


def _parse(data: bytes, where: str) -> Holder:
    remedy = "remove it if no process uses the run"
    holder = checked(parse_json(data, f"'{where}':", remedy=remedy), Holder, f"'{where}'")
    if not 0 < holder.pid < 2**31 or not 0 <= holder.started_s < 1e11:
        raise ValueError(f"'{where}' is not a lease; {remedy}")
    return holder


@contextmanager
def held(lease: Lease, *, renew_s: float = RENEW_S, end_s: float = END_S) -> Iterator[Lease]:
    """Hold the lease; a thread renews it, removes it at the end, and sets `lease.lost` if it is lost."""
    lease.acquire()
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(renew_s):
            try:
                lease.renew()
            except RunStoppedError as error:
                lease.lost = error
                return
            except Exception:  # the store is not reachable; the lease lasts for some renewals
                continue
        lease.release()

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join(end_s)  # the store may not be reachable
