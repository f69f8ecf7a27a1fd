"""A seekable file on top of range reads from an object store.

Reads fetch ahead, so that a decoder that reads 32 KiB at a time makes few requests: a block at a
new position is small, and each block that continues another is twice as long. Recent blocks are
cached per file. Blocks at both ends of an object are cached per process, because reopening an mp4
or parquet file reads its index again. A read returns correct bytes or raises, even if a library in
between swallows errors, and never mixes two versions of an object.
"""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from vlatune.storage.remote_fs import version_tag
from vlatune.storage.remote_retry import ShortBodyError, chain, object_changed, retried

KIB, MIB = 1024, 1024 * 1024
FIRST_BLOCK_BYTES = 256 * KIB
"""Size of a block at a new position; fetching it takes about as long as a request's latency."""
MAX_BLOCK_BYTES = 8 * MIB
"""Maximum block size; large enough to amortise latency, small enough to make retries cheap."""
SMALL_OBJECT_BYTES = 1 * MIB
"""Objects up to this size are fetched in one request."""
KEPT_BYTES = 16 * MIB
"""Recent blocks that an open file keeps."""
EDGE_BYTES = 4 * MIB
"""Blocks within this distance of an object's ends stay cached in the process after closing."""
PROCESS_BYTES = 64 * MIB
"""Limit of the process-wide cache; the least recently used objects are evicted first."""


@dataclass(frozen=True)
class Block:
    begin: int
    data: bytes
    ahead: int
    """Read-ahead size with which the block was fetched; the next block gets twice as much."""

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


def plan_fetch(at: int, want: int, size: int, blocks: Iterable[Block]) -> tuple[int, int, int]:
    """Plan the (begin, end, read-ahead) to fetch for `want` bytes at `at`, absent from `blocks`.

        blocks     [ A: 256K )                     [ B )
        at                    ^ A's end: 512K, at most to B
        at               anywhere else: 256K ^

    Reads of at least a full block get exactly the bytes they ask for.
    """
    if size <= SMALL_OBJECT_BYTES:
        return 0, size, FIRST_BLOCK_BYTES
    ahead, limit = FIRST_BLOCK_BYTES, size
    for block in blocks:
        if block.end == at:
            ahead = max(ahead, min(2 * block.ahead, MAX_BLOCK_BYTES))
        elif block.begin > at:
            limit = min(limit, block.begin)
    if want >= FIRST_BLOCK_BYTES:
        ahead = FIRST_BLOCK_BYTES
        return at, min(at + min(want, MAX_BLOCK_BYTES), limit), ahead
    return at, min(at + ahead, limit), ahead


class EdgeCache:
    """Process-wide cache of blocks at the ends of objects, by (object, version)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, str], dict[int, Block]] = OrderedDict()

    def get(self, key: tuple[str, str]) -> list[Block]:
        with self._lock:
            if key not in self._blocks:
                return []
            self._blocks.move_to_end(key)
            return list(self._blocks[key].values())

    def put(self, key: tuple[str, str], block: Block) -> None:
        with self._lock:
            self._blocks.setdefault(key, {})[block.begin] = block
            self._blocks.move_to_end(key)
            while sum(len(one.data) for blocks in self._blocks.values() for one in blocks.values()) > PROCESS_BYTES:
                self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks; also run after a fork, where the lock may be held by a lost thread."""
        self.__init__()


edges = EdgeCache()
os.register_at_fork(after_in_child=edges.clear)


class RemoteFile(io.BufferedIOBase):
    """Use it in a `with` statement: some failures are only raised on exit. Not thread-safe."""

    def __init__(self, fs: Any, path: str, where: str, *, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._fs, self._path, self._where, self._secrets = fs, path, where, secrets
        self._raw = self._retried(lambda: fs.open(path, "rb", cache_type="none"))
        info = self._retried(lambda: getattr(self._raw, "details", None) or fs.info(path))
        if info.get("type") == "directory":
            raise IsADirectoryError(f"{where}: is a folder, expected a file")
        if info.get("size") is None:
            raise RuntimeError(
                f"{where}: the server does not state its size, so ranges cannot be read; copy the dataset"
            )
        self._size = int(info["size"])
        self._tag = version_tag(info)  # None if unknown: blocks are not shared
        # s3fs sends If-Match with every GET, so the server detects changes; else see __exit__.
        self._is_conditional = "IfMatch" in getattr(self._raw, "req_kw", {})
        self._blocks = edges.get((where, self._tag)) if self._tag else []  # least recently used first
        self._at = 0
        self._failure: Exception | None = None
        self._has_fetched = False

    def __repr__(self) -> str:
        return f"RemoteFile({self._where!r})"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"{self._where}: cannot seek to {base + offset}, before the start")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Return `size` bytes, fewer only at the end of the object.

        After a failure, reads return nothing: ffmpeg continues to read for a while, and PyAV prints
        a traceback for every further error. Leaving the context raises the failure.
        """
        self._checkClosed()
        left = max(0, self._size - self._at) if self._failure is None else 0
        left = left if size is None or size < 0 else min(size, left)
        pieces: list[bytes] = []
        while left:
            block = self._block_at(self._at, left)
            piece = block.data[self._at - block.begin : self._at - block.begin + left]
            pieces.append(piece)
            self._at += len(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(size)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_raw"):
            self._raw.close()
            self._blocks = []
        super().close()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raise swallowed failures: ffmpeg may treat a failed read as the end of the file."""
        blocks = self._blocks
        self.close()
        if self._failure is not None and self._failure not in chain(error):
            raise self._failure
        if self._failure is None and self._has_fetched and not self._is_conditional:
            self._check_unchanged()
            for block in blocks:
                self._share(block)

    def _block_at(self, at: int, want: int) -> Block:
        for position in range(len(self._blocks) - 1, -1, -1):
            if self._blocks[position].begin <= at < self._blocks[position].end:
                self._blocks.append(self._blocks.pop(position))
                return self._blocks[-1]
        begin, end, ahead = plan_fetch(at, want, self._size, self._blocks)
        self._has_fetched = True
        try:
            block = Block(begin, self._retried(lambda: self._get(begin, end)), ahead)
        except Exception as error:
            self._failure = error
            raise
        self._blocks.append(block)
        while len(self._blocks) > 1 and sum(len(one.data) for one in self._blocks) > KEPT_BYTES:
            self._blocks.pop(0)
        if self._is_conditional:
            self._share(block)
        return block

    def _share(self, block: Block) -> None:
        """Put a block whose version is certain into the process-wide cache."""
        if self._tag and (block.begin < EDGE_BYTES or block.end > self._size - EDGE_BYTES):
            edges.put((self._where, self._tag), block)

    def _get(self, begin: int, end: int) -> bytes:
        self._raw.seek(begin)
        data = self._raw.read(end - begin)
        if len(data) != end - begin:
            if not self._is_conditional:
                self._check_unchanged()
            raise ShortBodyError(f"{len(data)} bytes came for the range {begin}-{end - 1} of {end - begin}")
        return data

    def _check_unchanged(self) -> None:
        self._fs.invalidate_cache(self._path)
        info = self._retried(lambda: self._fs.info(self._path))
        if (version_tag(info), int(info.get("size") or 0)) != (self._tag, self._size):
            raise object_changed(self._where)

    def _retried[T](self, call: Callable[[], T]) -> T:
        return retried(call, self._where, secrets=self._secrets)
