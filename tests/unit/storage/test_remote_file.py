"""Range reads: which requests a remote file makes, and that its bytes are right."""

import io
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.storage import remote_file, remote_retry
from vlatune.storage.remote_file import BLOCK_BYTES, RemoteFile

SMALL = {"BLOCK_BYTES": 8, "MAX_BLOCKS": 6, "CACHED_BLOCKS": 12}
"""Constants so small that a few hundred bytes cover every case."""


class Store:
    """A filesystem with one object, that records the requested ranges."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.ranges: list[tuple[int, int]] = []
        self.at = 0
        self.details = {"size": len(data), "ETag": str(hash(data)), "type": "file"}

    def open(self, path: str, mode: str, **_: Any) -> "Store":
        return self

    def info(self, path: str) -> dict[str, Any]:
        return self.details

    def invalidate_cache(self, path: str) -> None: ...

    def close(self) -> None: ...

    def seek(self, at: int) -> None:
        self.at = at

    def read(self, size: int) -> bytes:
        self.ranges.append((self.at, self.at + size))
        return self.data[self.at : self.at + size]


def opened(store: Store, name: str = "object") -> RemoteFile:
    return RemoteFile(store, name, name)


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    remote_file.cache.clear()


steps = st.lists(
    st.tuples(st.sampled_from(["read", "set", "cur", "end", "reopen"]), st.integers(0, 700)), min_size=1, max_size=40
)


@given(st.binary(max_size=600), steps)
def test_reads_equal_those_of_a_file_in_memory(data: bytes, steps: list[tuple[str, int]]) -> None:
    remote_file.cache.clear()
    with mock.patch.multiple(remote_file, **SMALL):
        store, plain = Store(data), io.BytesIO(data)
        file = opened(store)
        for what, number in steps:
            if what == "read":
                assert file.read(number) == plain.read(number)
            elif what == "set":
                assert file.seek(number) == plain.seek(number)
            elif what == "cur":
                assert file.seek(number, io.SEEK_CUR) == plain.seek(number, io.SEEK_CUR)
            elif what == "end":
                back = min(number, len(data))
                assert file.seek(-back, io.SEEK_END) == plain.seek(-back, io.SEEK_END)
            else:
                file.__exit__(None, None, None)
                file = opened(store)
                plain.seek(0)
            assert file.tell() == plain.tell()
        assert file.read() == plain.read()
    assert all(0 <= begin < end <= len(data) for begin, end in store.ranges)


def test_a_sequential_reader_makes_few_requests_and_gets_each_byte_once() -> None:
    store = Store(bytes(100 * 1024 * 1024))
    with opened(store) as file:
        while file.read(32 * 1024):
            pass
    assert len(store.ranges) == 26  # one block, then four at a time
    assert sum(end - begin for begin, end in store.ranges) == len(store.data)


def test_a_random_reader_gets_small_blocks() -> None:
    store = Store(bytes(100 * 1024 * 1024))
    with opened(store) as file:
        for at in range(10_000_000, 90_000_000, 10_000_000):
            file.seek(at)
            file.read(1000)
    assert [end - begin for begin, end in store.ranges] == [BLOCK_BYTES] * 8


def test_the_head_and_the_tail_are_fetched_once() -> None:
    """Read like a decoder: the start, the index at the end, the start again; then the object is opened again."""
    store = Store(bytes(50 * 1024 * 1024))
    for _ in range(2):
        with opened(store) as file:
            file.read(32 * 1024)
            file.seek(-100_000, io.SEEK_END)
            file.read()
            file.seek(40_000)
            file.read(32 * 1024)
    assert store.ranges == [(0, BLOCK_BYTES), (len(store.data) - BLOCK_BYTES, len(store.data))]


def test_a_large_read_is_few_requests() -> None:
    store = Store(bytes(20 * BLOCK_BYTES))
    with opened(store) as file:
        file.seek(BLOCK_BYTES + 5)
        assert len(file.read(10 * BLOCK_BYTES)) == 10 * BLOCK_BYTES
    assert [(begin // BLOCK_BYTES, end // BLOCK_BYTES) for begin, end in store.ranges] == [(1, 9), (9, 13)]


def test_blocks_of_an_object_that_changed_are_not_shared() -> None:
    store = Store(b"a" * 1000)
    first = dict(store.details)

    def read_both() -> None:
        with opened(store) as file:
            store.data = b"b" * 1000
            file.read()
            store.details = first | {"ETag": "other"}

    with pytest.raises(RuntimeError, match="changed while it was read"):
        read_both()
    store.data, store.details = b"a" * 1000, first
    with opened(store) as file:
        assert file.read() == store.data


def test_an_unknown_size_is_an_error() -> None:
    store = Store(b"x")
    store.details["size"] = None
    with pytest.raises(RuntimeError, match="'object': the server does not state its size"):
        opened(store, "'object'")


def test_a_broken_connection_has_no_status() -> None:
    """aiohttp's parser gives a body that was cut off the code 400."""
    parser_error = Exception("cut off")
    parser_error.code = 400  # pyright: ignore[reportAttributeAccessIssue]
    broken = ConnectionError("lost")
    broken.__cause__ = parser_error
    assert remote_retry.status_of(parser_error) == 400
    assert remote_retry.status_of(broken) is None
    assert remote_retry.is_transient(broken)
