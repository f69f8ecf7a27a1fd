"""Location of a dataset's files, a folder or any fsspec URL, as a small picklable object.

Local files are available as plain paths for fast readers. Names and links that leave the root are
rejected (files.py), remote calls are retried (remote_retry.py), and remote files are read in ranges
(remote_file.py). Credentials come from the environment or `storage_options` and are never printed.

`vlatune inspect --write_checksums` writes SHA-256 checksums of all files to meta/checksums.json, to
detect corruption. If it exists, every file is verified when it is first opened in a process, and
again after it changed. Checksums do not authenticate: anyone who can change the files can also
change the checksums.
"""

import errno
import functools
import hashlib
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, cast

from vlatune.console import has_secret
from vlatune.storage.files import (
    MAX_JSON_BYTES,
    RejectedFileError,
    make_folder,
    open_file,
    parse_json,
    real_path,
    write_text,
)
from vlatune.storage.paths import is_local, local_path
from vlatune.storage.remote_file import RemoteFile
from vlatune.storage.remote_fs import filesystem_for, secrets_in, version_tag
from vlatune.storage.remote_retry import retried

CHECKSUMS = "meta/checksums.json"
MAX_CHECKSUMS_BYTES = 128 << 20
REMEDY = f"download it again; if you changed the dataset, delete {CHECKSUMS} and write it with `vlatune inspect --write_checksums`"


@dataclass(frozen=True)
class Root:
    """The root folder of a dataset."""

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    has_checksums: bool = True
    """Use meta/checksums.json if it exists; checkpoints have manifests instead."""
    started_in: str | None = field(default=None, compare=False, repr=False)
    """Base of a relative path, because Ray's processes have other working directories."""

    def __post_init__(self) -> None:
        if has_secret(self.url):  # the URL appears in messages, logs and reports
            raise ValueError(
                "a dataset's URL holds a password, a token or a signature; put it into storage_options or the environment"
            )
        if self.is_local and self.started_in is None:
            object.__setattr__(self, "started_in", str(Path.cwd()))  # the dataclass is frozen

    @property
    def is_local(self) -> bool:
        return is_local(self.url)

    @property
    def path(self) -> str:
        """The root as named by its filesystem."""
        if self.is_local:
            return str(Path(self.started_in or "", local_path(self.url)))
        return self.filesystem()._strip_protocol(self.url)

    def filesystem(self) -> Any:
        """Return the fsspec filesystem of this process; do not keep it across a fork."""
        if self.is_local:
            import fsspec

            return fsspec.filesystem("file")
        return filesystem_for(self.url, self.storage_options)

    def join(self, name: str) -> str:
        """Return the full name of a file below the root; reject names that leave it."""
        parts = name.split("/")
        if posixpath.isabs(name) or ".." in parts or "\\" in name or "\0" in name:
            raise ValueError(
                f"dataset '{self.url}': the file name '{name}' leaves the dataset's folder; correct meta/info.json"
            )
        return f"{self.path.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        full = self.join(name)
        return Path(full).exists() if self.is_local else self._remote_exists(full)

    def is_dir(self) -> bool:
        return Path(self.path).is_dir() if self.is_local else self._remote_exists(self.path)

    def open(self, name: str) -> IO[bytes]:
        """Open a file in a `with` statement; remote files raise some failures on exit."""
        self._verify(name)
        return self.open_unverified(name)

    def open_unverified(self, name: str) -> IO[bytes]:
        """Open a file without checking meta/checksums.json."""
        full = self.join(name)
        if self.is_local:
            return open_file(self.path, name)
        opened = RemoteFile(self.filesystem(), full, self._where(full), secrets=secrets_in(self.storage_options))
        return cast("IO[bytes]", opened)

    def read_bytes(self, name: str, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """Read a small file completely."""
        with self.open(name) as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise RejectedFileError(
                f"dataset '{self.url}': {name} exceeds the limit of {max_bytes:,} bytes; it is damaged, or another file under this name"
            )
        return data

    def local_path(self, name: str) -> str:
        """Return the path of a regular local file, for libraries that open by path."""
        self.join(name)
        path = str(real_path(self.path, name))
        self._verify(name)
        return path

    def open_for_ffmpeg(self, name: str) -> AbstractContextManager[str | IO[bytes]]:
        """Return a context with the path of a local file, or with an open remote file."""
        return nullcontext(self.local_path(name)) if self.is_local else self.open(name)

    def _verify(self, name: str) -> None:
        """Reject a file that does not match its checksum; do nothing without checksums."""
        self.join(name)
        if not self.has_checksums or name == CHECKSUMS:
            return
        version = _checksums_version(self) if self.is_local else _first_version(self)
        if not version:
            return
        where, sums = f"dataset '{self.url}': {name}", _checksums(self, version)
        if name not in sums:
            raise ValueError(f"{where} is not in {CHECKSUMS}; {REMEDY}")
        if _hash(self, name, self.version(name)) != sums[name]:
            raise ValueError(f"{where} is damaged: it does not match its checksum in {CHECKSUMS}; {REMEDY}")

    def version(self, name: str) -> str:
        """Return a tag that changes with the file: mtime and size, or ETag and size if remote."""
        full = self.join(name)
        if self.is_local:
            stat = real_path(self.path, name).stat()
            return f"{stat.st_mtime_ns}-{stat.st_size}"
        info = self._remote_info(full)
        return version_tag(info) or str(info.get("size"))

    def glob(self, pattern: str) -> list[str]:
        """Return matching names relative to the root, sorted; `*` and `?` do not match `/`."""
        *folders, last = pattern.split("/")
        found = [""]
        for part in folders:  # level by level: fsspec's glob treats a failed listing as an empty folder
            is_name = not re.search(r"[*?[]", part)
            found = [
                f"{folder}{name}/" for folder in found for name in ([part] if is_name else self._names(folder, part))
            ]
        return sorted(f"{folder}{name}" for folder in found for name in self._names(folder, last))

    def _names(self, folder: str, pattern: str) -> list[str]:
        return [name for name in self.entries(folder) if fnmatchcase(name, pattern)]

    def entries(self, folder: str = "") -> dict[str, int | None]:
        """Map the names in a folder to bytes, or None for folders; empty if the folder does not exist."""
        full = self.join(folder).rstrip("/")
        if self.is_local:
            return dict(_local_entries(full))
        fs = self.filesystem()
        fs.invalidate_cache(full)
        try:
            listed = self._retried(lambda: fs.ls(full, detail=True), full)
        except FileNotFoundError:
            return {}
        sizes = {
            str(one["name"]).rstrip("/"): None if one["type"] == "directory" else int(one.get("size") or 0)
            for one in listed
        }
        # Some stores list a folder or a file as its own content.
        return {posixpath.basename(name): size for name, size in sizes.items() if name != full}

    def _remote_exists(self, full: str) -> bool:
        try:
            self._remote_info(full)
        except FileNotFoundError:
            return False
        return True

    def _remote_info(self, full: str) -> dict[str, Any]:
        fs = self.filesystem()
        fs.invalidate_cache(full)
        return self._retried(lambda: fs.info(full), full)

    def _retried[T](self, call: Callable[[], T], full: str) -> T:
        return retried(call, self._where(full), secrets=secrets_in(self.storage_options))

    def _where(self, full: str) -> str:
        """Return an object's name for messages, with the user's scheme."""
        return f"'{self.url.partition('://')[0]}://{full.removeprefix('/')}'"


def _local_entries(folder: str) -> Iterator[tuple[str, int | None]]:
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            try:
                yield entry.name, None if entry.is_dir() else entry.stat().st_size
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):  # dangling and cyclic links are no files
                    raise


def write_checksums(root: Root, names: Iterable[str]) -> int:
    """Hash the named files of a local dataset and return their number."""
    if not root.is_local:
        raise ValueError(
            f"dataset '{root.url}': checksums can only be written for a local folder; copy the dataset first"
        )
    sums = {name: _hash(root, name, root.version(name)) for name in sorted(set(names) - {CHECKSUMS})}
    folder = make_folder(Path(root.path), "meta")
    write_text(folder / Path(CHECKSUMS).name, json.dumps({"sha256": sums}, indent=1) + "\n")
    return len(sums)


def _checksums_version(root: Root) -> str:
    """Return the version of a dataset's checksums; empty if there are none."""
    try:
        return root.version(CHECKSUMS)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # stores may deny access to missing objects
        return ""


_first_version = functools.lru_cache(maxsize=64)(_checksums_version)  # a store is asked once per process


@functools.lru_cache(maxsize=1 << 20)
def _hash(root: Root, name: str, version: str) -> str:
    """Return the checksum of a file; `version` makes the cache forget a file that changed."""
    with root.open_unverified(name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


@functools.lru_cache(maxsize=64)
def _checksums(root: Root, version: str) -> dict[str, str]:
    """Return the checksums by file name; `version` is as in `_hash`."""
    where = f"dataset '{root.url}': {CHECKSUMS}"
    found = parse_json(root.read_bytes(CHECKSUMS, max_bytes=MAX_CHECKSUMS_BYTES), where)
    sums = found.get("sha256") if isinstance(found, dict) else None
    if not isinstance(sums, dict) or not sums or not all(isinstance(one, str) for one in sums.values()):
        raise ValueError(f"{where} holds no checksums by file name; {REMEDY}")
    return sums
