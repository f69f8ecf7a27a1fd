"""Safe access to untrusted files: datasets, base models, checkpoints, run folders, configs.

Reading accepts only regular files of limited size below the given folder. Symlinks that leave the
folder, devices, FIFOs and sockets are rejected without blocking. Symlinks within the folder are
allowed, as is the Hugging Face cache, where `snapshots/<revision>/file` links to `blobs/`. Writing
follows no symlinks and is atomic: to a temporary file or folder, then renamed. Concurrent changes
by an attacker are out of scope.
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

from vlatune.storage.limits import check_limit

MAX_JSON_BYTES = 16 << 20
"""Maximum size of JSON files, which may need fifty times as much memory when parsed."""
MAX_TOKENIZER_BYTES = 128 << 20
"""Maximum size of tokenizer.json."""
MAX_CONFIG_BYTES = 1 << 20
"""Maximum size of a config file; parsing YAML is slow."""
MAX_LINES_BYTES = 4 << 30
"""Maximum size of files that are read line by line: metrics.jsonl, samples.jsonl."""
MAX_DEPTH = 16
FILE_TYPES = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
WRITE = os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
NEW = WRITE | os.O_WRONLY | os.O_EXCL


class RejectedFileError(ValueError):
    """A file was rejected because of its type, location or size."""


def real_path(folder: Path | str, name: str) -> Path:
    """Return the resolved path of a regular file, for libraries that open by path.

    Raises FileNotFoundError if it does not exist.
    """
    path = Path(folder) / name
    try:
        real = Path(os.path.realpath(path, strict=True))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RejectedFileError(f"'{path}' is a link to itself; remove it, or download it again") from None
    roots = [Path(os.path.realpath(folder))]
    cache = next((one.parent for one in roots[0].parents if one.name == "snapshots"), None)
    if cache and not (cache / "blobs").is_symlink():
        roots.append(cache / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise RejectedFileError(
            f"'{path}' is a link to a file outside of '{folder}'; copy the file into the folder, or bind-mount its folder"
        )
    _require_regular(path, real.lstat().st_mode)
    return real


def open_file(folder: Path | str, name: str, *, max_bytes: int | None = None) -> IO[bytes]:
    """Open a file below a folder for reading."""
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
    """Read all of a small file."""
    with open_file(folder, name, max_bytes=max_bytes) as file:
        data = file.read(max_bytes + 1)
    _require_size(Path(folder) / name, len(data), max_bytes)  # it may have grown
    return data


def read_json(folder: Path | str, name: str, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a small file."""
    where = f"'{Path(folder) / name}'"
    found = parse_json(read_file(folder, name, max_bytes=max_bytes), where, remedy="restore it from a backup")
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds a {type(found).__name__}, expected a JSON object")
    return found


def parse_json(data: bytes, where: str, *, remedy: str = "download it again") -> Any:
    """Parse untrusted JSON with limited size and depth; `where` starts the error messages."""
    check_limit("json_values", data.count(b",") + data.count(b"[") + data.count(b"{"), f"{where} has JSON values:")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not readable JSON ({error}); {remedy}") from None
    level, depth = [found], 0
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        check_limit("json_depth", depth, f"{where} is nested to a depth of")
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    return found


def make_folder(folder: Path, name: str) -> Path:
    """Create a folder below `folder` if missing; reject symlinks."""
    made = folder
    made.mkdir(parents=True, exist_ok=True)
    for part in Path(name).parts:
        made /= part
        reject_link(made)
        made.mkdir(exist_ok=True)
    return made


def make_output_folder(folder: Path) -> Path:
    """Create the output folder of a command; reject a symlink, which could lead anywhere."""
    return make_folder(folder.parent, folder.name)


def reject_link(path: Path) -> None:
    """Reject a symlink as a target of writing or deletion."""
    if path.is_symlink():
        raise RejectedFileError(
            f"'{path}' is a link, and nothing is written or deleted through links; remove it, or give the real folder"
        )


def reject_links_out(folder: Path, *, skip: Collection[str] = ()) -> None:
    """Reject a folder that contains symlinks to the outside; entries in `skip` are not searched."""
    real = folder.resolve()
    for path in _links_below(folder, skip, 0):
        if not path.resolve().is_relative_to(real):
            raise RejectedFileError(
                f"'{path}' is a link to a file outside of '{folder}', and nothing is written through links; remove it"
            )


def _links_below(folder: Path, skip: Collection[str], depth: int) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name) if folder.is_dir() else ():
        if entry.is_symlink():
            yield Path(entry.path)
        elif entry.name not in skip and depth < MAX_DEPTH and entry.is_dir(follow_symlinks=False):
            yield from _links_below(Path(entry.path), (), depth + 1)


def open_to_append(path: Path) -> IO[str]:
    """Open a text file for appending; create it if missing."""
    reject_link(path)
    try:
        descriptor = os.open(path, WRITE | os.O_WRONLY | os.O_APPEND, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a FIFO without a reader, or a socket
            raise
        raise RejectedFileError(f"'{path}' is a FIFO or a socket, expected a regular file; remove it") from None
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "a", encoding="utf-8")


def write_atomic(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file atomically; a symlink at `path` is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process with the same pid
    try:
        with os.fdopen(os.open(temporary, NEW, 0o666), "wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)  # persist the rename


def write_text(path: Path, text: str) -> None:
    """Write text atomically; characters that UTF-8 cannot encode (lone surrogates) become '?'."""
    write_atomic(path, [text.encode("utf-8", errors="replace")])


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` as JSON atomically; non-finite numbers are rejected."""
    require_finite(obj, Path(path).name)
    write_text(Path(path), json.dumps(obj, indent=2, allow_nan=False) + "\n")


def require_finite(value: Any, where: str) -> None:
    """Raise if a JSON value contains a number that is not finite, and name it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RuntimeError(f"{where}: {value} cannot be recorded; the run has diverged, or a meter divided by zero")
    if isinstance(value, dict):
        for key, part in value.items():
            require_finite(part, f"{where}: {key}")
    elif isinstance(value, list | tuple):
        for position, part in enumerate(value):
            require_finite(part, f"{where}[{position}]")


def write_new(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file that must not exist yet."""
    with os.fdopen(os.open(path, NEW, mode), "wb") as file:
        file.write(data)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` on success and removed on failure.

    `folder` must be missing or empty. Files are not synced: callers that need durability do so.
    """
    reject_link(folder)
    remove_leftovers(folder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        replace_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Rename a complete folder to its final name, which is free or an empty folder, durably."""
    temporary.rename(folder)
    sync(folder.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary folders of killed writers of `folder`."""
    import psutil  # slow to import, and rarely needed

    for left in folder.parent.glob(".*.partial"):
        name, _, pid = left.name.removesuffix(".partial").rpartition(".")
        if name == f".{folder.name}" and pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        found = FILE_TYPES.get(stat.S_IFMT(mode), "device")
        raise RejectedFileError(f"'{path}' is a {found}, expected a regular file; remove it, or download it again")


def _require_size(path: Path, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise RejectedFileError(
            f"'{path}' has {num_bytes:,} bytes, above the limit of {max_bytes:,}; it is damaged, or another file under this name"
        )
