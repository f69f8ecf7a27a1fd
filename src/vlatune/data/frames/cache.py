"""Decoded frames on the local disk of a node, shared by all runs that use it.

    DIR/usage            bytes of all parts; locked while a part is added or evicted
    DIR/3f09...c1.part   up to PART_FRAMES frames of one camera and episode, resized, uint8

    a part:  0      magic and identity
             40     a 64-bit checksum per frame, 0 while the frame is not stored
             4096   the frames, each at 4096 + n * frame_bytes

The identity of a part covers everything that determines its pixels: the recorded file, the size and
the resize method. It is also the part's name, so a changed dataset never hits. The checksum of a
frame covers its number and time as well as its pixels. A part takes its full size when it is
created, within the budget, and is filled frame by frame: first the pixels, then the checksum. A
process that is killed in between leaves a frame that is not stored, and a damaged frame fails its
checksum; both are decoded again. Processes that store the same frame at once write the same bytes.

The folder's content is not trusted: links, files of other users and files of other kinds are
neither read nor written, and files with other names are left alone.

A full cache evicts complete parts that were last used before the run began, never the run's own: a
dataset larger than the budget keeps a stable share of its frames cached.
"""

import fcntl
import functools
import hashlib
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import xxhash

from vlatune.data.read_spec import CacheSettings, CameraSpec, FrameSource, Unit
from vlatune.storage.root import Root

PART_FRAMES = 32
MAGIC = b"vtframe1"
HEADER_BYTES = 4096
CHECKSUMS = slice(40, 40 + 8 * PART_FRAMES)
FOLDER_BYTES = 1 << 20
"""Budget for the folder and the usage file."""
ENTRY_BYTES = 4096
"""Budget per part for its entry in the folder and for the file system's list of its blocks."""
PART_NAME, LEFTOVER_NAME = re.compile(r"[0-9a-f]{64}\.part"), re.compile(r"[0-9a-f]{64}\.new")
EVICT_PARTS = 64
"""Parts to evict at once, because finding the oldest ones reads every folder."""
FULL_S = 30.0
"""Seconds until a full cache is tried again."""
LOCK_S, START_LOCK_S = 2.0, 60.0
"""Seconds to wait for the lock, to create a part and at the start of a run; its owner may be suspended."""
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
CHANGE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class PartSpec:
    identity: bytes
    """SHA-256 of everything that determines the pixels."""
    num_frames: int
    frame_bytes: int

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.num_frames * self.frame_bytes

    @property
    def disk_bytes(self) -> int:
        return disk_bytes(self.num_bytes)

    @property
    def name(self) -> str:
        return f"{self.identity.hex()}.part"


def disk_bytes(num_bytes: int) -> int:
    """Return the largest number of bytes that a part of this size takes on disk, in blocks of 4 KiB."""
    return -(-num_bytes // 4096) * 4096 + ENTRY_BYTES


class FrameCache:
    """Parts below one folder. Every operation is safe beside other processes and after a kill."""

    def __init__(self, settings: CacheSettings) -> None:
        self._folder = Path(settings.folder)
        self._max_bytes = settings.max_bytes
        self._reserve_bytes = settings.reserve_bytes
        self._started_s = settings.started_s
        self._full_until_s = 0.0
        _require_own_folder(self._folder)

    def read(self, part: PartSpec, frames: np.ndarray, times_s: np.ndarray, out_N: np.ndarray) -> np.ndarray:
        """Copy the stored frames among `frames` (numbers within the part) into their rows.

        Return a mask of the rows that were filled; the others hold undefined values.
        """
        found = np.zeros(len(frames), dtype=bool)
        with suppress(OSError), self._opened(part, READ) as descriptor:  # an unreadable disk holds nothing
            if descriptor is None:
                return found
            checksums = np.frombuffer(os.pread(descriptor, HEADER_BYTES, 0)[CHECKSUMS], dtype="<u8")
            for row, (frame, time_s) in enumerate(zip(frames.tolist(), times_s.tolist(), strict=True)):
                if checksums[frame]:
                    out = out_N[row]
                    os.preadv(descriptor, [memoryview(out).cast("B")], HEADER_BYTES + frame * part.frame_bytes)
                    found[row] = _checksum(out, frame, time_s) == checksums[frame]
            if os.fstat(descriptor).st_mtime < self._started_s:
                os.utime(descriptor)
        return found

    def write(self, part: PartSpec, frames: np.ndarray, times_s: np.ndarray, rows_N: np.ndarray) -> None:
        """Store frames of a part, if the budget has room for it; a failed write stores nothing."""
        with suppress(OSError):
            with self._opened(part, CHANGE) as existing:
                if existing is not None:
                    _store(existing, part, frames, times_s, rows_N)
                    return
            if self._create(part):
                with self._opened(part, CHANGE) as created:
                    if created is not None:  # evicted by another run
                        _store(created, part, frames, times_s, rows_N)

    def has_first(self, identity: bytes) -> bool:
        """True if a part of any size exists and holds its first frame, which may be damaged."""
        with suppress(OSError), _open_file(self._folder / PartSpec(identity, 1, 0).name, READ) as descriptor:
            header = os.pread(descriptor, CHECKSUMS.start + 8, 0)
            return header[: CHECKSUMS.start] == MAGIC + identity and any(header[CHECKSUMS.start :])
        return False  # missing, a link, or a folder

    def recount(self) -> None:
        """Correct the usage file after kills and deletions, and evict parts that exceed the budget.

        Parts are created and evicted under the same lock, so leftover temporary files belong to
        killed processes.
        """
        with self._locked(START_LOCK_S) as usage:
            for path, _ in self._files(LEFTOVER_NAME):
                path.unlink()
            _write_usage(usage, self._make_room(0, 0))

    def _create(self, part: PartSpec) -> bool:
        """Create an empty part; return False if the cache is full."""
        if part.disk_bytes > self._max_bytes or time.monotonic() < self._full_until_s:
            return False
        path = self._folder / part.name
        try:
            with self._locked(LOCK_S) as usage:
                used = _read_usage(usage)
                with self._opened(part, READ) as existing:
                    if existing is not None:  # made by another process
                        return True
                path.unlink(missing_ok=True)  # damaged: its bytes stay counted until room is needed
                if used is None or self._lacking_bytes(used, part.disk_bytes) > 0:  # None: a new folder
                    used = self._make_room(part.disk_bytes, EVICT_PARTS)
                if self._lacking_bytes(used, part.disk_bytes) > 0:
                    _write_usage(usage, used)
                    self._full_until_s = time.monotonic() + FULL_S
                    return False
                _write_usage(usage, used + part.disk_bytes)  # first: a kill must not leave a part uncounted
                _make_part(path, part)
        except OSError:  # no space left, lock not free, or the folder is gone or not usable
            self._full_until_s = time.monotonic() + FULL_S
            return False
        return True

    def stored_bytes(self) -> int:
        """Return the bytes of all parts, with what they need in the folder."""
        return FOLDER_BYTES + sum(disk_bytes(status.st_size) for _, status in self._files(PART_NAME))

    def _lacking_bytes(self, used_bytes: int, new_bytes: int) -> int:
        """Return how many bytes budget and disk lack for new parts."""
        return new_bytes + max(used_bytes - self._max_bytes, self._reserve_bytes - _free_bytes(self._folder))

    def _make_room(self, new_bytes: int, min_parts: int) -> int:
        """Evict parts last used before this run, oldest first, until `new_bytes` fit; return the bytes left.

        If anything is evicted, at least `min_parts` parts are.
        """
        parts = sorted((status.st_mtime, path, disk_bytes(status.st_size)) for path, status in self._files(PART_NAME))
        used = FOLDER_BYTES + sum(size for _, _, size in parts)
        lacking = self._lacking_bytes(used, new_bytes)
        for count, (used_s, path, size) in enumerate(parts):
            if used_s >= self._started_s or (lacking <= 0 and (count == 0 or count >= min_parts)):
                break
            path.unlink(missing_ok=True)
            used, lacking = used - size, lacking - size
        return used

    def _files(self, name: re.Pattern[str]) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the regular files and links with such a name; links are not followed."""
        for entry in os.scandir(self._folder):
            if name.fullmatch(entry.name) and not entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield Path(entry.path), entry.stat(follow_symlinks=False)

    @contextmanager
    def _opened(self, part: PartSpec, flags: int) -> Iterator[int | None]:
        """Yield a descriptor of a valid part, or None."""
        with ExitStack() as stack:
            descriptor = None
            with suppress(OSError):  # missing, a link, or another user's
                descriptor = stack.enter_context(_open_file(self._folder / part.name, flags))
            yield descriptor if descriptor is not None and _is_valid(descriptor, part) else None

    @contextmanager
    def _locked(self, max_wait_s: float) -> Iterator[int]:
        path = self._folder / "usage"
        with _open_file(path, CHANGE | os.O_CREAT) as descriptor:
            if not _is_own_file(os.fstat(descriptor)):
                raise OSError(f"--dataset.cache: '{path}' is not a regular file of this user; remove it")
            _lock(descriptor, path, max_wait_s)
            yield descriptor


@contextmanager
def _open_file(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_cache(settings: CacheSettings) -> FrameCache:
    """Make the folder if it is missing, correct its usage, and return the cache. For the start of a run."""
    Path(settings.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    cache = FrameCache(settings)
    cache.recount()
    return cache


def room_bytes(settings: CacheSettings) -> int:
    """Return how many bytes the frames of a run may take, for which other parts are evicted.

    Creates nothing; raise if the folder cannot be used.
    """
    folder = Path(settings.folder)
    existing = next(one for one in (folder, *folder.parents) if one.is_dir())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"--dataset.cache: '{existing}' is not writable; name another folder")
    used_bytes = 0
    if existing == folder:
        used_bytes = FrameCache(settings).stored_bytes()
    return max(0, min(settings.max_bytes, used_bytes + _free_bytes(existing) - settings.reserve_bytes))


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


@dataclass(frozen=True)
class CachedFrames:
    """Frames of another source, read from the cache where they are stored."""

    source: FrameSource
    root: Root
    camera: CameraSpec
    tolerance_s: float
    settings: CacheSettings

    def read_into(self, unit: Unit, frames: np.ndarray, times_s: np.ndarray, out: np.ndarray) -> int:
        cache, identity = _cache_of(self.settings), self._identity(unit)
        if cache is None or identity is None:
            return self.source.read_into(unit, frames, times_s, out)
        number, within = np.divmod(frames, PART_FRAMES)
        parts: list[tuple[PartSpec, slice]] = []
        found = np.zeros(len(frames), dtype=bool)
        for nth in np.unique(number).tolist():
            num_frames = min(PART_FRAMES, unit.length - nth * PART_FRAMES)
            part = PartSpec(part_identity(identity, nth), num_frames, out[0].nbytes)
            rows = slice(*np.searchsorted(number, [nth, nth + 1]).tolist())
            found[rows] = cache.read(part, within[rows], times_s[rows], out[rows])
            parts.append((part, rows))
        if found.all():
            return len(frames)
        if found.any():
            decoded = np.empty_like(out[~found])
            self.source.read_into(unit, frames[~found], times_s[~found], decoded)
            out[~found] = decoded
        else:
            self.source.read_into(unit, frames, times_s, out)
        for part, rows in parts:
            missing = ~found[rows]
            if missing.any():
                cache.write(part, within[rows][missing], times_s[rows][missing], out[rows][missing])
        return int(found.sum())

    def _identity(self, unit: Unit) -> bytes | None:
        """Hash everything that determines the pixels of an episode, except the times of its frames.

        Return None if the file cannot be found, which the source reports.
        """
        camera = self.camera
        places = [(file, from_s) for name, file, from_s in unit.videos if name == camera.name]
        file, begin = places[0] if places else (unit.data_path, unit.data_offset)
        try:
            recorded = file_identity(self.root, file)
        except (OSError, ValueError):
            return None
        resized = (camera.height, camera.width, camera.pad)
        return part_identity(av.__version__, recorded, begin, camera.name, *resized, unit.length, self.tolerance_s)


def file_identity(root: Root, name: str) -> str:
    """Return the location of a file and what changes when its content does."""
    if not root.is_local:
        return _remote_identity(root, name)
    path = os.path.realpath(root.join(name))
    found = Path(path).stat()
    return f"{path} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


@functools.cache
def _remote_identity(root: Root, name: str) -> str:
    """Return URL, size and ETag; asked once per process, so that warm reads need no requests."""
    version = root.version(name)
    if version.isdigit():  # its size alone
        raise ValueError(f"'{root.url}': {name} has no version, so a changed file could not be recognised")
    return f"{root.url} {name} {version}"


@functools.cache
def _cache_of(settings: CacheSettings) -> FrameCache | None:
    """Return this process's cache, or None if the folder cannot be used on this node."""
    try:
        Path(settings.folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        return FrameCache(settings)
    except (OSError, ValueError):
        return None


def part_identity(*parts: bytes | str | int | float) -> bytes:
    """Hash what determines the pixels of a part; each piece is preceded by its length."""
    digest = hashlib.sha256()
    for one in parts:
        data = one if isinstance(one, bytes) else repr(one).encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()


def _require_own_folder(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"--dataset.cache: '{folder}' is not a folder; name another one")
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ValueError(
            f"--dataset.cache: '{folder}' belongs to another user or is writable by others, who could replace frames; "
            f"name a folder of your own, or run `chmod go-w {folder}`"
        )


def _is_valid(descriptor: int, part: PartSpec) -> bool:
    status = os.fstat(descriptor)
    return (
        _is_own_file(status)
        and status.st_size == part.num_bytes
        and os.pread(descriptor, 40, 0) == MAGIC + part.identity
    )


def _is_own_file(status: os.stat_result) -> bool:
    """True for a regular file of this user that has no other name."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1


def _lock(descriptor: int, path: Path, max_wait_s: float) -> None:
    deadline_s = time.monotonic() + max_wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"--dataset.cache: another process has held the lock of '{path}' for {max_wait_s:.0f} s; end it, or "
                    f"name another folder"
                ) from None
        time.sleep(0.01)


def _make_part(path: Path, part: PartSpec) -> None:
    """Create a part of full size without frames, atomically. The caller holds the lock."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)  # of a killed process; opening it could write to another name of the file
    with _open_file(temporary, CHANGE | os.O_CREAT | os.O_EXCL) as descriptor:
        try:
            os.posix_fallocate(descriptor, 0, part.num_bytes)
            os.pwrite(descriptor, MAGIC + part.identity, 0)
            temporary.rename(path)
        except OSError:
            temporary.unlink()
            raise


def _store(descriptor: int, part: PartSpec, frames: np.ndarray, times_s: np.ndarray, rows_N: np.ndarray) -> None:
    for row, frame, time_s in zip(rows_N, frames.tolist(), times_s.tolist(), strict=True):
        os.pwrite(descriptor, memoryview(row).cast("B"), HEADER_BYTES + frame * part.frame_bytes)
        os.pwrite(descriptor, struct.pack("<Q", _checksum(row, frame, time_s)), CHECKSUMS.start + 8 * frame)


def _checksum(row: np.ndarray, frame: int, time_s: float) -> int:
    """Return a checksum of a frame with its position and time; never 0."""
    seed = xxhash.xxh3_64_intdigest(struct.pack("<qd", frame, time_s))
    return xxhash.xxh3_64_intdigest(row, seed=seed) or 1


def _read_usage(descriptor: int) -> int | None:
    data = os.pread(descriptor, 9, 0)
    return struct.unpack("<Q", data)[0] if len(data) == 8 else None


def _write_usage(descriptor: int, used_bytes: int) -> None:
    os.pwrite(descriptor, struct.pack("<Q", used_bytes), 0)
