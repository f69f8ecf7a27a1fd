"""Where a dataset's files are: a folder or any fsspec URL, behind one small picklable object.

Promises: a plain path when there is one, so that the fast readers need no file object; names and links that would leave
the root are refused (files.py); remote calls are retried (remote_retry.py) and remote files read in ranges (remote_file.py). Credentials
come from the environment or from `storage_options`, and are never printed.
"""

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, cast

from vlatune.console import has_secret
from vlatune.dataset.storage.checksums import verify
from vlatune.dataset.storage.remote_file import RemoteFile
from vlatune.dataset.storage.remote_fs import filesystem_for, secrets_in, version_tag
from vlatune.dataset.storage.remote_retry import retried
from vlatune.files import MAX_JSON_BYTES, RefusedFileError, open_file, real_path

LOCAL_SCHEMES = ("", "file", "local")


@dataclass(frozen=True)
class Root:
    """The root folder of a dataset."""

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)
    has_checksums: bool = True
    """Whether meta/checksums.json is looked for; a place for checkpoints has manifests instead."""
    sums_version: str | None = field(default=None, compare=False, repr=False)
    """Of a store's meta/checksums.json when the run began, empty where there was none; None: nobody has asked yet."""
    started_in: str | None = field(default=None, compare=False, repr=False)
    """The folder that a relative path counts from, which goes along: Ray's processes have other working directories."""

    def __post_init__(self) -> None:
        if has_secret(self.url):  # the URL is part of messages, logs and reports
            raise ValueError(
                "a dataset's URL holds a password, a token or a signature; give it in storage_options or in the environment"
            )
        if self.is_local and self.started_in is None:
            object.__setattr__(self, "started_in", str(Path.cwd()))  # frozen; set once, as it is made

    @property
    def is_local(self) -> bool:
        scheme, found, _ = self.url.partition("://")
        return not found or scheme in LOCAL_SCHEMES

    @property
    def path(self) -> str:
        """The root as its filesystem names it."""
        if self.is_local:
            return str(Path(self.started_in or "", Path(self.url.partition("://")[2] or self.url).expanduser()))
        return self.filesystem()._strip_protocol(self.url)

    def filesystem(self) -> Any:
        """The fsspec filesystem of this process; not for keeping over a fork."""
        if self.is_local:
            import fsspec

            return fsspec.filesystem("file")
        return filesystem_for(self.url, self.storage_options)

    def join(self, name: str) -> str:
        """The full name of a file below the root; `..`, absolute names and the like are refused."""
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
        """The file, seekable; in a `with` statement, as a remote one tells at its end of failures on the way."""
        self._verify(name)
        return self.open_unverified(name)

    def open_unverified(self, name: str) -> IO[bytes]:
        """The same, whatever meta/checksums.json says of it."""
        full = self.join(name)
        if self.is_local:
            return open_file(self.path, name)
        opened = RemoteFile(self.filesystem(), full, self._where(full), secrets=secrets_in(self.storage_options))
        return cast("IO[bytes]", opened)

    def read_bytes(self, name: str, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
        """All of a small file."""
        with self.open(name) as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise RefusedFileError(
                f"dataset '{self.url}': {name} has more than the {max_bytes:,} bytes that are read; it is damaged or not what its name says"
            )
        return data

    def local_path(self, name: str) -> str:
        """A local file for libraries that open by path: a regular one, below the root."""
        self.join(name)
        path = str(real_path(self.path, name))
        self._verify(name)
        return path

    def _verify(self, name: str) -> None:
        self.join(name)
        if self.has_checksums:
            verify(self, name)

    def version(self, name: str) -> str:
        """A tag that changes when the file does: time and size of a local one, ETag and size of an object.

        One request for a remote file, none of its bytes.
        """
        full = self.join(name)
        if self.is_local:
            stat = Path(full).stat()
            return f"{stat.st_mtime_ns}-{stat.st_size}"
        info = self._remote_info(full)
        return version_tag(info) or str(info.get("size"))

    def glob(self, pattern: str) -> list[str]:
        """Names below the root that match, sorted, relative to the root; `*` and `?` stay within a folder."""
        if "**" in pattern:
            raise ValueError(f"pattern '{pattern}': ** is not supported; name the folders, or use * for each")
        if self.is_local:
            base = Path(self.path)
            return sorted(found.relative_to(base).as_posix() for found in base.glob(pattern))
        prefix = self.path.rstrip("/")
        return sorted(found.removeprefix(prefix + "/") for found in self._remote_glob(prefix, pattern.split("/")))

    def _remote_glob(self, folder: str, parts: list[str]) -> list[str]:
        """By hand: fsspec's own takes a listing that failed for an empty folder."""
        while len(parts) > 1 and not re.search(r"[*?[]", parts[0]):
            folder, parts = f"{folder}/{parts[0]}", parts[1:]
        names = [name for name in self._remote_names(folder) if fnmatchcase(posixpath.basename(name), parts[0])]
        if len(parts) == 1:
            return names
        return [found for name in names for found in self._remote_glob(name, parts[1:])]

    def _remote_names(self, folder: str) -> list[str]:
        fs = self.filesystem()
        fs.invalidate_cache(folder)
        try:
            listed = self._retried(lambda: fs.ls(folder, detail=False), folder)
        except FileNotFoundError:
            return []
        inside = [str(name).rstrip("/") for name in listed]
        # Some stores list a folder, or a file, as being in itself.
        return [f"{folder}/{posixpath.basename(name)}" for name in inside if name != folder]

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
        """An object's name in messages: with the scheme that the user wrote."""
        return f"'{self.url.partition('://')[0]}://{full.removeprefix('/')}'"
