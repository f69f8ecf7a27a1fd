"""Copy a folder between this machine and a URL: base models, and the small files of a run.

`fetch_folder` keeps a copy per machine, under a hash of the files' names, sizes and versions. It is
written once (file lock, atomic rename), and verified against the sizes and, if the folder has a
manifest, against its SHA-256 sums. A manifest is uploaded last, so it marks a complete folder.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from vlatune.storage.files import atomic_folder, make_folder, open_file, open_to_append, parse_json
from vlatune.storage.limits import check_limit
from vlatune.storage.remote_fs import version_tag
from vlatune.storage.remote_retry import retried
from vlatune.storage.root import Root

SUMS = "sha256.json"
CHUNK_BYTES = 8 << 20
MIN_UPLOAD_BYTES_PER_S, UPLOAD_GRACE_S = 1_000_000, 30.0
"""Uploads that are slower than this rate, after some seconds, are treated as stalled."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlatune"


def files_below(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return the names of the files below a folder that match a pattern, sorted."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if _matches(name, patterns))


def fetch_folder(root: Root, patterns: Sequence[str], on_chunk: Callable[[], object] = lambda: None) -> Path:
    """Return a local copy of the files below a URL that match a pattern; downloads it once."""
    listed = list_files(root, (*patterns, SUMS))
    key = hashlib.sha256(json.dumps([root.url, sorted(listed.items())]).encode()).hexdigest()[:32]
    folder = make_folder(cache_folder(), "folders") / key
    make_once(folder, lambda temporary: _download(root, listed, temporary, on_chunk))
    return folder


def make_once(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder unless it exists; other processes of this machine wait until it is complete."""
    with open_to_append(folder.with_name(f"{folder.name}.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with atomic_folder(folder) as temporary:
                make(temporary)


def list_files(root: Root, patterns: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Return size and version of the files below a URL that match a pattern, by name."""
    top, fs = root.path.rstrip("/"), root.filesystem()
    fs.invalidate_cache(top)
    try:
        found = retried(lambda: fs.find(top, detail=True), f"'{root.url}'")
    except FileNotFoundError:
        found = {}
    check_limit("listed_files", len(found), f"'{root.url}' has files:")
    names = {name.removeprefix(top).lstrip("/"): info for name, info in found.items()}
    return {
        name: (int(info["size"]), version_tag(info) or "")
        for name, info in names.items()
        if _matches(name, patterns) and ".." not in PurePosixPath(name).parts and name.isprintable()
    }


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)  # * also matches /, as on the hub


def _download(root: Root, listed: Mapping[str, tuple[int, str]], folder: Path, on_chunk: Callable[[], object]) -> None:
    sums = None
    if SUMS in listed:
        sums = parse_json(root.read_bytes(SUMS), f"'{root.url}/{SUMS}'")
        if not isinstance(sums, dict) or set(sums) != set(listed) - {SUMS}:
            raise ValueError(f"'{root.url}': its files are not those in {SUMS}; upload it again")
    for name, (num_bytes, _) in listed.items():
        if name == SUMS:
            continue
        path, digest, copied = folder / name, hashlib.sha256(), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with root.open_unverified(name) as source, path.open("wb") as into:
            while chunk := source.read(CHUNK_BYTES):
                into.write(chunk)
                digest.update(chunk)
                copied += len(chunk)
                on_chunk()
        if copied != num_bytes or (sums is not None and digest.hexdigest() != sums[name]):
            raise RuntimeError(
                f"'{root.url}/{name}' is damaged: it does not match its size or its SHA-256; upload it again"
            )


def upload_folder(folder: Path, names: Iterable[str], root: Root) -> None:
    """Upload files with their SHA-256 sums; does nothing if the URL has a complete folder."""
    if root.exists(SUMS):
        return
    sums = {}
    for name in names:
        with open_file(folder, name) as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
        upload_file(folder / name, root, name)
    fs, full = root.filesystem(), root.join(SUMS)
    retried(lambda: fs.pipe_file(full, json.dumps(sums, indent=1).encode()), f"'{root.url}/{SUMS}'")


def upload_file(path: Path, root: Root, name: str) -> None:
    """Upload a file; stalled calls are aborted and retried."""
    fs, full = root.filesystem(), root.join(name)
    allowed_s = UPLOAD_GRACE_S + path.stat().st_size / MIN_UPLOAD_BYTES_PER_S
    # Asynchronous filesystems accept a timeout per call; stalled uploads have no other limit.
    limit = {"timeout": allowed_s} if fs.async_impl else {}
    retried(
        lambda: fs.put_file(str(path), full, **limit), f"'{root.url.partition('://')[0]}://{full.removeprefix('/')}'"
    )
