"""A seekable file over range reads from an object store.

A read fetches more than it asks for, so that a decoder that reads 32 KiB at a time makes few requests: a block at a
new place is small, each block that goes on where another ended is twice as long. The last few blocks stay, and those
at the two ends of an object stay in the process, as whoever opens an mp4 or a parquet file again reads its index again.
Promises: right bytes or an error, even where a library in between swallows it; never bytes of two versions of an object.
"""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from vlatune.dataset.storage.remote_fs import version_tag
from vlatune.dataset.storage.remote_retry import ShortBodyError, chain, changed, retried

KIB, MIB = 1024, 1024 * 1024
FIRST_BLOCK_BYTES = 256 * KIB
"""A block at a new place. A request costs an object store about as much time as this many bytes do."""
MAX_BLOCK_BYTES = 8 * MIB
"""The longest block: at 100 MB/s three quarters of the time go to bytes, and a retry loses little."""
SMALL_OBJECT_BYTES = 1 * MIB
"""Objects up to here are fetched whole, in one request."""
KEPT_BYTES = 16 * MIB
"""Recent blocks that an open file keeps."""
EDGE_BYTES = 4 * MIB
"""Blocks that touch the first or last so many bytes of an object stay in the process after it is closed."""
PROCESS_BYTES = 64 * MIB
"""Bytes of such blocks in a process; the least recently used objects go first."""


@dataclass(frozen=True)
class Block:
    begin: int
    data: bytes
    ahead: int
    """Length of the read-ahead that made it; the block after it gets twice that."""

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


def plan_fetch(at: int, want: int, size: int, blocks: Iterable[Block]) -> tuple[int, int, int]:
    """(begin, end, read-ahead) of the range to fetch for `want` bytes at `at`, which none of `blocks` holds.

        blocks     [ A: 256K )                     [ B )
        at                    ^ A's end: 512K, at most to B
        at               anywhere else: 256K ^

    A read of a whole block or more knows what it wants, and gets that.
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
    """Blocks at the ends of objects, by (object, version), for the next one in this process who opens it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, str], dict[int, Block]] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[str, str]) -> list[Block]:
        with self._lock:
            if key not in self._blocks:
                return []
            self._blocks.move_to_end(key)
            return list(self._blocks[key].values())

    def put(self, key: tuple[str, str], block: Block) -> None:
        with self._lock:
            blocks = self._blocks.setdefault(key, {})
            self._bytes += len(block.data) - len(blocks[block.begin].data if block.begin in blocks else b"")
            blocks[block.begin] = block
            self._blocks.move_to_end(key)
            while self._bytes > PROCESS_BYTES:
                _, dropped = self._blocks.popitem(last=False)
                self._bytes -= sum(len(one.data) for one in dropped.values())

    def clear(self) -> None:
        """Also after a fork: a lock that another thread held then would stay locked in the child."""
        self.__init__()


edges = EdgeCache()
os.register_at_fork(after_in_child=edges.clear)


class RemoteFile(io.BufferedIOBase):
    """Use it in a `with` statement: some failures can only be raised at its end. One thread at a time may read."""

    def __init__(self, fs: Any, path: str, where: str, *, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._fs, self._path, self._where, self._secrets = fs, path, where, secrets
        self._raw = self._retried(lambda: fs.open(path, "rb", cache_type="none"))
        info = self._retried(lambda: getattr(self._raw, "details", None) or fs.info(path))
        self._size = _checked_size(info, where)
        self._tag = version_tag(info)  # None: not known, so that nothing may be shared
        # s3fs sends If-Match with every GET, so that the server notices a change; for others we look at the end.
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
        """`size` bytes, fewer only at the end of the object.

        After a failure the object ends here: ffmpeg reads on for a while, and PyAV prints a traceback for every
        further error. Leaving the `with` statement raises the failure in any case.
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
        """Raise what was lost on the way: ffmpeg takes a failed read for the end of the file at some places."""
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
        block = Block(begin, self._fetch(begin, end), ahead)
        self._keep(block)
        return block

    def _keep(self, block: Block) -> None:
        self._blocks.append(block)
        while len(self._blocks) > 1 and sum(len(one.data) for one in self._blocks) > KEPT_BYTES:
            self._blocks.pop(0)
        if self._is_conditional:
            self._share(block)

    def _share(self, block: Block) -> None:
        """Leave a block that is surely of this version to the next one who opens the object."""
        if self._tag and (block.begin < EDGE_BYTES or block.end > self._size - EDGE_BYTES):
            edges.put((self._where, self._tag), block)

    def _fetch(self, begin: int, end: int) -> bytes:
        try:
            self._has_fetched = True
            return self._retried(lambda: self._get(begin, end))
        except Exception as error:
            self._failure = error
            raise

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
            raise changed(self._where)

    def _retried[T](self, call: Callable[[], T]) -> T:
        return retried(call, self._where, secrets=self._secrets)


def _checked_size(info: Any, where: str) -> int:
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{where}: is a folder, expected a file")
    if info.get("size") is None:
        raise RuntimeError(
            f"{where}: the server does not tell its size, so it cannot be read in ranges; copy the dataset"
        )
    return int(info["size"])
