"""A seekable file on top of range reads from an object store.

Reads fetch complete blocks, so that a decoder that reads 32 KiB at a time makes few requests. The
most recently used blocks are cached per process, because reopening an mp4 or parquet file reads its
index again. A read returns correct bytes or raises, even if a library in between swallows errors,
and never mixes two versions of an object.
"""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Any

from vlatune.storage.remote_fs import version_tag
from vlatune.storage.remote_retry import ShortBodyError, chain, object_changed, retried

BLOCK_BYTES = 1 << 20
"""Size of a block; fetching it takes about as long as a request's latency."""
BLOCKS_AHEAD = 4
"""Number of blocks fetched at once for a sequential reader."""
MAX_BLOCKS = 8
"""Maximum number of blocks fetched at once; small enough to make retries cheap."""
CACHED_BLOCKS = 64
"""Limit of the process-wide cache; the least recently used blocks are evicted first."""


class BlockCache:
    """Process-wide cache of blocks by (object and version, number of the block)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[object, int], bytes] = OrderedDict()

    def get(self, key: tuple[object, int]) -> bytes | None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def put(self, key: tuple[object, int], block: bytes) -> None:
        with self._lock:
            self._blocks[key] = block
            while len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks; also run after a fork, where the lock may be held by a lost thread."""
        self.__init__()


cache = BlockCache()
os.register_at_fork(after_in_child=cache.clear)


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
        self._tag = version_tag(info)
        # Without a version, blocks are not shared with other open files.
        self._key: object = (where, self._tag) if self._tag else object()
        # s3fs sends If-Match with every GET, so the server detects changes; else see __exit__.
        self._is_conditional = "IfMatch" in getattr(self._raw, "req_kw", {})
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
            number, begin = divmod(self._at, BLOCK_BYTES)
            piece = self._block(number, begin + left)[begin : begin + left]
            pieces.append(piece)
            self._at += len(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        if not self.closed and hasattr(self, "_raw"):
            self._raw.close()
        super().close()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Raise swallowed failures: ffmpeg may treat a failed read as the end of the file."""
        self.close()
        if self._failure is not None and self._failure not in chain(error):
            raise self._failure
        if self._failure is None and self._has_fetched and not self._is_conditional:
            self._check_unchanged()

    def _block(self, number: int, want: int) -> bytes:
        """Return a block; if it is missing, fetch it together with those that hold `want` bytes."""
        if (cached := cache.get((self._key, number))) is not None:
            return cached
        is_sequential = cache.get((self._key, number - 1)) is not None
        num_blocks = min(max(-(-want // BLOCK_BYTES), BLOCKS_AHEAD if is_sequential else 1), MAX_BLOCKS)
        begin, end = number * BLOCK_BYTES, min((number + num_blocks) * BLOCK_BYTES, self._size)
        self._has_fetched = True
        try:
            data = self._retried(lambda: self._get(begin, end))
        except Exception as error:
            self._failure = error
            raise
        blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
        for next_number, block in enumerate(blocks, start=number):
            cache.put((self._key, next_number), block)
        return blocks[0]

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
            cache.clear()  # it may hold blocks of both versions
            raise object_changed(self._where)

    def _retried[T](self, call: Callable[[], T]) -> T:
        return retried(call, self._where, secrets=self._secrets)
