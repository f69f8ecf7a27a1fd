"""meta/checksums.json: the SHA-256 of every file of a dataset, for damage that no decoder can see. Optional.

`vlatune inspect --write_checksums` writes it. Where it is there, everybody who opens a file of the dataset verifies it
first: once per file and process, again when the file changed. It tells damage, not authorship: who can change the files
can write new sums.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Protocol

from vlatune.files import make_folder, parse_json, write_text

CHECKSUMS = "meta/checksums.json"
MAX_BYTES = 128 << 20
ANEW = f"fetch it anew; if you changed the dataset, delete {CHECKSUMS} and write it anew with `vlatune inspect --write_checksums`"

_sums: dict[str, tuple[str, dict[str, str]]] = {}
"""Root -> version of its checksums.json, and what it holds; nothing where there is none."""
_verified: dict[tuple[str, str], tuple[str, str]] = {}
"""(root, file) -> the version of it that was verified, and the sum that it has."""


class Place(Protocol):
    """What is needed of a dataset's root (storage/root.py)."""

    @property
    def url(self) -> str: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def path(self) -> str: ...
    @property
    def sums_version(self) -> str | None: ...
    def version(self, name: str) -> str: ...
    def open_unverified(self, name: str) -> IO[bytes]: ...
    def read_bytes(self, name: str, *, max_bytes: int) -> bytes: ...


def write_checksums(root: Place, names: Iterable[str]) -> int:
    """Hash the named files of a dataset in a folder of this machine; returns their number."""
    if not root.is_local:
        raise ValueError(
            f"dataset '{root.url}': checksums are written where the dataset is a folder; copy it here first"
        )
    sums = {}
    for name in sorted(set(names) - {CHECKSUMS}):
        with root.open_unverified(name) as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
    folder = make_folder(Path(root.path), "meta")
    write_text(folder / Path(CHECKSUMS).name, json.dumps({"sha256": sums}, indent=1) + "\n")
    return len(sums)


def verify(root: Place, name: str) -> None:
    """Refuse a file that is not the one whose checksum is written down; without checksums, nothing happens."""
    sums = _sums_of(root) if name != CHECKSUMS else None
    if not sums:
        return
    version = root.version(name)
    if _verified.get((root.url, name)) == (version, sums.get(name)):
        return
    where = f"dataset '{root.url}': {name}"
    if name not in sums and name not in _sums_of(root, anew=True):
        raise ValueError(f"{where} is not in {CHECKSUMS}; {ANEW}")
    with root.open_unverified(name) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
    # Before a file is refused the store is asked again: its sums here may be those of an earlier run of this process.
    if found != sums.get(name) and found != _sums_of(root, anew=True).get(name):
        raise ValueError(f"{where} is damaged: its bytes are not those of its checksum in {CHECKSUMS}; {ANEW}")
    _verified[root.url, name] = version, found


def ask_sums(root: Place) -> str:
    """Before a dataset's metadata is read, which begins every run: checksums may have been added, or taken away.

    The version of those that hold for the run, empty for none; its root tells it to other processes, which may have asked in
    an earlier run.
    """
    _sums_of(root, anew=True)
    return _sums[root.url][0]


def _sums_of(root: Place, *, anew: bool = False) -> dict[str, str]:
    """A folder is asked each time, which costs microseconds; a store once a run."""
    held = _sums.get(root.url)
    if held is not None and not root.is_local and not anew and root.sums_version in (None, held[0]):
        return held[1]
    try:
        version = root.version(CHECKSUMS)
    except (
        FileNotFoundError,
        NotADirectoryError,
        PermissionError,
    ):  # stores deny what is not there to who may not list
        _sums[root.url] = ("", {})
        return {}
    if _sums.get(root.url, ("",))[0] != version:
        _sums[root.url] = (version, _read(root))
    return _sums[root.url][1]


def _read(root: Place) -> dict[str, str]:
    where = f"dataset '{root.url}': {CHECKSUMS}"
    found = parse_json(root.read_bytes(CHECKSUMS, max_bytes=MAX_BYTES), where)
    sums = found.get("sha256") if isinstance(found, dict) else None
    if not isinstance(sums, dict) or not sums or not all(isinstance(one, str) for one in sums.values()):
        raise ValueError(f"{where} holds no checksums by file name; {ANEW}")
    return sums
