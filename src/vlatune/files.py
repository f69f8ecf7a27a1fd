"""The one door for files that come from outside: datasets, base models, checkpoints, run folders, configs.

Reading: a regular file that really lies below the given folder, of at most so many bytes. Links that lead out, devices,
FIFOs and sockets are refused without waiting for them; a link inside the folder is fine, and so is the Hugging Face
cache, whose `snapshots/<revision>/file` is a link into `blobs/` beside it. Writing: no link is followed, neither by the
file's name nor by a folder on the way; files and folders are whole or not there, written aside and renamed. Whoever can
change a folder while it is being read owns the machine already.
"""

import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vlatune.limits import check_limit

MAX_JSON_BYTES = 16 << 20
"""JSON takes up to fifty times its size in memory. LeRobot's largest, a robot's stats.json, has some 100 kB."""
MAX_TOKENIZER_BYTES = 128 << 20
"""Gemma's tokenizer.json has 33 MB."""
MAX_LINES_BYTES = 4 << 30
"""Files that are read line by line: metrics.jsonl, samples.jsonl."""
MAX_DEPTH = 16
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
WRITE = os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
NEW = WRITE | os.O_WRONLY | os.O_EXCL


class RefusedFileError(ValueError):
    """A file that is not opened, whatever it holds."""


def real_path(folder: Path | str, name: str) -> Path:
    """Where a regular file really lies, for libraries that open by path; FileNotFoundError when it is not there."""
    path = Path(folder) / name
    try:
        real = Path(os.path.realpath(path, strict=True))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RefusedFileError(f"'{path}' is a link that leads back to itself; remove it, or fetch it anew") from None
    if not any(real.is_relative_to(place) for place in _places(folder)):
        raise RefusedFileError(
            f"'{path}' is a link that leads out of '{folder}', which is not followed; copy the file to its place, or bind-mount its folder there"
        )
    _require_regular(path, real.lstat().st_mode)
    return real


def open_file(folder: Path | str, name: str, *, max_bytes: int | None = None) -> IO[bytes]:
    """A file below a folder, open for reading."""
    real = real_path(folder, name)
    descriptor = os.open(real, READ)
    try:
        found = os.fstat(descriptor)
        _require_regular(real, found.st_mode)
        if max_bytes is not None:
            _require_size(Path(folder) / name, found.st_size, max_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_file(folder: Path | str, name: str, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """All of a small file."""
    with open_file(folder, name, max_bytes=max_bytes) as file:
        data = file.read(max_bytes + 1)
    _require_size(Path(folder) / name, len(data), max_bytes)  # it may have grown
    return data


def read_json(folder: Path | str, name: str, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a small file."""
    where = f"'{Path(folder) / name}'"
    found = parse_json(read_file(folder, name, max_bytes=max_bytes), where, remedy="take it from a backup")
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds a {type(found).__name__}, expected a JSON object")
    return found


def parse_json(data: bytes, where: str, *, remedy: str = "fetch it anew") -> Any:
    """JSON of a stranger: with at most so many values, nested at most so deep. `where` begins the messages."""
    check_limit("json_values", data.count(b",") + data.count(b"[") + data.count(b"{"), f"{where} has JSON values:")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not readable JSON ({error}); {remedy}") from None
    level, depth = [found], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        check_limit("json_depth", depth, f"{where} is nested to a depth of")
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return found


def make_folder(folder: Path, name: str) -> Path:
    """A folder below `folder`, made where it is missing; one that is a link is refused."""
    made = folder
    made.mkdir(parents=True, exist_ok=True)
    for part in Path(name).parts:
        made /= part
        refuse_link(made)
        made.mkdir(exist_ok=True)
    return made


def refuse_link(path: Path) -> None:
    """For what is written to, or whose content is deleted."""
    if path.is_symlink():
        raise RefusedFileError(
            f"'{path}' is a link, and nothing is written or deleted through links; remove it, or give the real folder"
        )


def open_to_append(path: Path) -> IO[str]:
    """For text that is added at the end."""
    return os.fdopen(_open_to_write(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")


def open_to_change(path: Path) -> IO[bytes]:
    """For changes in place; the file is made where it is missing."""
    return os.fdopen(_open_to_write(path, os.O_RDWR), "rb+")


def write_aside(path: Path, chunks: Iterable[bytes]) -> None:
    """A reader sees the old file or the new one, whatever happens; a link at that place is replaced, not followed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    aside.unlink(missing_ok=True)  # of a killed process that had our number
    try:
        with os.fdopen(os.open(aside, NEW, 0o666), "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync(path.parent)  # the rename itself


def write_text(path: Path, text: str) -> None:
    """The same for text. What UTF-8 cannot say (half a surrogate pair in a dataset's sentence) becomes '?'."""
    write_aside(path, [text.encode("utf-8", errors="replace")])


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` so that a reader sees the old file or the new one, whatever happens."""
    require_finite(obj, Path(path).name)
    write_text(Path(path), json.dumps(obj, indent=2, allow_nan=False) + "\n")


def require_finite(value: Any, place: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise RuntimeError(f"{place}: {value} cannot be recorded; the run has diverged, or a meter divided by zero")
    if isinstance(value, dict):
        for key, part in value.items():
            require_finite(part, f"{place}: {key}")
    elif isinstance(value, list | tuple):
        for position, part in enumerate(value):
            require_finite(part, f"{place}[{position}]")


def write_new(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """A file that must not be there yet."""
    with os.fdopen(os.open(path, NEW, mode), "wb") as file:
        file.write(data)


def sync(path: Path) -> None:
    """A file's bytes, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        put_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def put_folder(aside: Path, folder: Path) -> None:
    """Give a whole folder its name, which is free or an empty folder's, so that it stays there."""
    aside.rename(folder)
    sync(folder.parent)


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


def refuse_links_out(folder: Path, *, skip: Collection[str] = ()) -> None:
    """Refuse a folder in which something is a link to outside of it; `skip` names entries that are not looked into."""
    real = folder.resolve()
    for path in _links_below(folder, skip, 0):
        if not path.resolve().is_relative_to(real):
            raise RefusedFileError(
                f"'{path}' is a link that leads out of '{folder}', and nothing is written through links; remove it"
            )


def _links_below(folder: Path, skip: Collection[str], depth: int) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda one: one.name) if folder.is_dir() else ():
        if entry.is_symlink():
            yield Path(entry.path)
        elif entry.name not in skip and depth < MAX_DEPTH and entry.is_dir(follow_symlinks=False):
            yield from _links_below(Path(entry.path), (), depth + 1)


def _places(folder: Path | str) -> list[Path]:
    """Where a folder's files may really lie: below it, or among the blobs of the hub's cache that it is part of."""
    real = Path(os.path.realpath(folder))
    cache = next((one.parent for one in real.parents if one.name == "snapshots"), None)
    blobs = cache / "blobs" if cache else None
    return [real, blobs] if blobs and not blobs.is_symlink() and blobs.is_dir() else [real]


def _open_to_write(path: Path, mode: int) -> int:
    refuse_link(path)
    try:
        descriptor = os.open(path, WRITE | mode, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a FIFO that nobody reads, or a socket
            raise
        raise RefusedFileError(f"'{path}' is a FIFO or a socket, expected a file; remove it") from None
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise RefusedFileError(f"'{path}' is {kind}, expected a file; remove it, or fetch it anew")


def _require_size(path: Path, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RefusedFileError(
            f"'{path}' has {num_bytes:,} bytes, more than the {max_bytes:,} that are read; it is damaged or not what its name says"
        )
