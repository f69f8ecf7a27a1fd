"""Where a dataset's files are: a folder or any fsspec URL, behind one small picklable object.

Promises: `local()` gives a plain path when there is one, so that the fast readers need no file object;
names that would leave the root are refused. Credentials come from the environment or from
`storage_options`, and are never printed.
"""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

LOCAL_SCHEMES = ("", "file")


@dataclass(frozen=True)
class Root:
    """The root folder of a dataset."""

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_local(self) -> bool:
        scheme, found, _ = self.url.partition("://")
        return not found or scheme in LOCAL_SCHEMES

    @property
    def path(self) -> str:
        """The root as its filesystem names it."""
        if self.is_local:
            return str(Path(self.url.removeprefix("file://")).expanduser())
        return self.filesystem()._strip_protocol(self.url)

    def filesystem(self) -> Any:
        import fsspec

        return fsspec.url_to_fs(self.url, **self.storage_options)[0]

    def join(self, name: str) -> str:
        """The full name of a file below the root; `..`, absolute names and the like are refused."""
        parts = name.split("/")
        if posixpath.isabs(name) or ".." in parts or "\\" in name or "\0" in name:
            raise ValueError(f"dataset '{self.url}': the file name '{name}' leaves the dataset's folder; correct meta/info.json")
        return f"{self.path.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        full = self.join(name)
        return Path(full).exists() if self.is_local else self.filesystem().exists(full)

    def is_dir(self) -> bool:
        return Path(self.path).is_dir() if self.is_local else self.filesystem().exists(self.path)

    def open(self, name: str) -> IO[bytes]:
        full = self.join(name)
        return Path(full).open("rb") if self.is_local else self.filesystem().open(full, "rb")

    def read_bytes(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def glob(self, pattern: str) -> list[str]:
        """Names below the root that match, sorted, relative to the root."""
        if self.is_local:
            base = Path(self.path)
            return sorted(found.relative_to(base).as_posix() for found in base.glob(pattern))
        prefix = self.path.rstrip("/") + "/"
        return sorted(str(found).removeprefix(prefix) for found in self.filesystem().glob(prefix + pattern))
