"""The one door for a dataset's parquet files: nothing in them can run code, and columns of odd types are refused.

Whoever imports ray.data, datasets or pandas registers Arrow extension types. Their Python code runs while Arrow restores
a type from the footer's note `ARROW:schema`, and again when values are converted; ray's `arrow_pickled_object` unpickles
them. So the footer is read here as bytes and the note's key is renamed before Arrow sees it: files are read by the types
that parquet itself stores. The note is looked at apart, with its extension names made inert the same way.

A footer may tell less than its pages hold. So Arrow reads through `PageGuard`, which adds up the pages' own headers on
their way, local file or remote: bytes that Arrow asks for anyway, and no request more.
"""

import base64
import binascii
import io
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from vlatune.dataset.storage.root import Root
from vlatune.limits import UNPACKED_SHARE, TooMuchError, check_limit

MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
"""Read at once from the end of a file: it holds most footers."""
BUFFER_BYTES = 1 << 20
HEADER_BYTES, MAX_HEADER_BYTES = 2 << 10, 4 << 20
"""Of a page: most have a hundred bytes; one with the least and greatest text as statistics may have many."""
SLACK_BYTES = 1 << 20
"""Writers differ in what they count into a column's size."""
DATA_PAGES = (5, 8)
"""Fields of a page's header that are a data page's own, by version; 7 is a dictionary's."""
NOTE, INERT_NOTE = b"ARROW:schema", b"inert:schema"
NAME, INERT_NAME = b"ARROW:extension:name", b"inert:extension:name"
"""Of the same length, so that a replacement moves nothing in the footer or in the note."""
STORED_AS_PLAIN = {
    *(f"datasets.features.features.Array{axes}DExtensionType" for axes in range(2, 6)),
    "arrow.json",
}
"""Extension types that LeRobot writes: features of two and more axes are lists of lists, JSON is text."""
PLAIN: tuple[Callable[[pa.DataType], bool], ...] = (
    types.is_null,
    types.is_primitive,  # numbers, bool, dates, times
    types.is_decimal,
    types.is_string,
    types.is_large_string,
    types.is_string_view,
    types.is_binary,
    types.is_large_binary,
    types.is_binary_view,
    types.is_fixed_size_binary,
)
NESTED: tuple[Callable[[pa.DataType], bool], ...] = (
    types.is_list,
    types.is_large_list,
    types.is_fixed_size_list,
    types.is_struct,
    types.is_map,
)
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What damaged parquet raises. PermissionError is among the OSErrors, but it is the world's: handle it before."""


@contextmanager
def opened(
    root: Root, name: str, columns: Sequence[str] = (), *, remedy: str = "fetch the dataset anew"
) -> Iterator[pq.ParquetFile]:
    """The file, with the columns in it; whatever is wrong with it is told with its name."""
    where = f"dataset '{root.url}': {name}"
    try:
        with root.open(name) as file:
            yield _with_columns(where, file, columns)
    except PermissionError:
        raise
    except TooMuchError as error:
        raise TooMuchError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
    except FileNotFoundError as error:
        raise ValueError(f"{where} is missing; {remedy}") from error
    except UNREADABLE as error:
        raise ValueError(f"{where} is not readable parquet ({error}); {remedy}") from error


def open_parquet(file: IO[bytes]) -> pq.ParquetFile:
    """A file whose columns are plain; the errors do not name it, as the caller knows more of it."""
    footer = _read_footer(file).replace(NOTE, INERT_NOTE)
    alone = MAGIC + footer + struct.pack("<I", len(footer)) + MAGIC
    metadata = pq.ParquetFile(pa.BufferReader(alone), arrow_extensions_enabled=False).metadata
    _check_rows(metadata)
    check_plain(_noted_schema(metadata))
    guard = PageGuard(file, metadata)
    parquet = PageCheckedFile(
        guard, metadata=metadata, buffer_size=BUFFER_BYTES, pre_buffer=False, arrow_extensions_enabled=False
    )
    parquet.guard = guard
    check_plain(parquet.schema_arrow)
    return parquet


class PageCheckedFile(pq.ParquetFile):
    """Tells its guard which columns are about to be read. On one thread: of a read that failed on several, those that
    are left call into a Python that may have ended, and abort it.
    """

    guard: "PageGuard"

    def read(self, columns: list[str] | None = None, **options: Any) -> pa.Table:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.guard.expect(range(self.num_row_groups), columns)
        return super().read(columns, **{"use_threads": False} | options)

    def read_row_group(self, i: int, columns: list[str] | None = None, **options: Any) -> pa.Table:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.guard.expect([i], columns)
        return super().read_row_group(i, columns, **{"use_threads": False} | options)

    def iter_batches(self, batch_size: int = 65536, row_groups: Any = None, columns: Any = None, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.guard.expect(range(self.num_row_groups) if row_groups is None else row_groups, columns)
        return super().iter_batches(batch_size, row_groups, columns, **{"use_threads": False} | options)


class PageGuard(io.RawIOBase):
    """The file, as Arrow reads it. Before bytes are handed over, the headers of all pages that begin in them are checked.

    Arrow reads a column of a row group from its first page on, so each is met at its begin.
    """

    def __init__(self, file: IO[bytes], metadata: pq.FileMetaData) -> None:
        super().__init__()
        self._file, self._metadata = file, metadata
        self._expected: list[tuple[int, int, int]] = []
        """(first byte, row group, column), rising."""
        self._begun: dict[tuple[int, int], ColumnPages] = {}

    def expect(self, groups: Iterable[int], columns: Sequence[str] | None) -> None:
        """What will be read; an earlier reader may still go on."""
        self._expected = sorted({*self._expected, *columns_of(self._metadata, groups, columns)})

    def read(self, size: int = -1, /) -> bytes:
        begin = self._file.tell()
        data = self._file.read(size)
        check_pages(self._file, self._met(begin, begin + len(data)), begin + len(data))
        self._file.seek(begin + len(data))
        return data

    def _met(self, begin: int, end: int) -> list["ColumnPages"]:
        """The columns that begin in these bytes, and those that have begun before and go on in them."""
        first, last = (bisect_left(self._expected, (at, -1, -1)) for at in (begin, end))
        self._begun = {key: pages for key, pages in self._begun.items() if not pages.is_done}
        for _, group, number in self._expected[first:last]:
            self._begun[group, number] = ColumnPages(self._metadata.row_group(group).column(number))
        del self._expected[first:last]
        return [pages for pages in self._begun.values() if begin < pages.end]

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def columns_of(
    metadata: pq.FileMetaData, groups: Iterable[int], columns: Sequence[str] | None
) -> list[tuple[int, int, int]]:
    """(first byte, row group, column) of all that is read of these."""
    prefixes = None if columns is None else tuple(f"{column}." for column in columns)
    paths = [f"{metadata.schema.column(number).path}." for number in range(metadata.num_columns)]
    numbers = [number for number, path in enumerate(paths) if prefixes is None or path.startswith(prefixes)]
    found = []
    for group in groups:
        row_group = metadata.row_group(group)
        if row_group.num_rows:
            found += [(_first_byte(row_group.column(number)), group, number) for number in numbers]
    return found


def check_pages(file: IO[bytes], columns: Iterable["ColumnPages"], end: int) -> None:
    """Refuse columns whose pages that begin before `end` hold more than the footer tells."""
    for pages in columns:
        pages.check_until(file, end)


def _first_byte(chunk: pq.ColumnChunkMetaData) -> int:
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        return min(chunk.data_page_offset, chunk.dictionary_page_offset)
    return chunk.data_page_offset


class ColumnPages:
    """The pages of one column of a row group, added up: they hold no more than the footer tells, as that is what the
    caps were held against.
    """

    def __init__(self, chunk: pq.ColumnChunkMetaData) -> None:
        self._chunk = chunk
        self._at = _first_byte(chunk)
        self.end = self._at + chunk.total_compressed_size
        self._bytes = self._values = 0

    @property
    def is_done(self) -> bool:
        return self._at >= self.end

    def check_until(self, file: IO[bytes], end: int) -> None:
        while self._at < min(self.end, end):
            header, at = _page_header(file, self._at, self.end)
            values = [header[field].get(1) for field in DATA_PAGES if isinstance(header.get(field), dict)]
            unpacked, packed = header.get(2, -1), header.get(3, -1)
            if not all(isinstance(number, int) and number >= 0 for number in (unpacked, packed, *values)):
                raise pa.ArrowInvalid(f"column '{self._chunk.path_in_schema[:80]}': a page has no size")
            self._at, self._bytes = at + packed, self._bytes + unpacked
            self._values += sum(values)
            self._require_told()

    def _require_told(self) -> None:
        told_values, told_bytes = self._chunk.num_values, self._chunk.total_uncompressed_size
        if self._values > told_values or self._bytes > 2 * told_bytes + SLACK_BYTES:
            raise TooMuchError(
                f"column '{self._chunk.path_in_schema[:80]}': its pages hold {self._values:,} values and {self._bytes:,} bytes or more, "
                f"its footer tells of {told_values:,} and {told_bytes:,}; fetch the file anew"
            )


def _page_header(file: IO[bytes], at: int, end: int) -> tuple[dict[int, Any], int]:
    """The fields of a page's header by number, and where it ends, which is before `end`."""
    size = HEADER_BYTES
    while size <= MAX_HEADER_BYTES:
        file.seek(at)
        data = file.read(min(size, end - at))
        try:
            fields, used = _fields(data, 0, 0)
        except IndexError:
            if len(data) < size:
                break
            size *= 16
            continue
        return fields, at + used
    raise pa.ArrowInvalid(f"the header of a page at byte {at} does not end")


def _fields(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """A struct in Thrift's compact form: (step to the field's number, kind) in a byte, its value, ... until a zero."""
    found: dict[int, Any] = {}
    number = 0
    while data[at]:
        step, kind = data[at] >> 4, data[at] & 15
        at += 1
        if not step:
            number, at = _zigzag(data, at)
        else:
            number += step
        found[number], at = _value(data, at, kind, depth)
    return found, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _zigzag(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        length, at = _varint(data, at)
        if at + length > len(data):
            raise IndexError
        return None, at + length
    if kind == 12 and depth < 8:
        return _fields(data, at, depth + 1)
    raise pa.ArrowInvalid("the header of a page is damaged")  # lists and maps: no page's header has one


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise pa.ArrowInvalid("the header of a page is damaged")


def check_plain(schema: pa.Schema) -> None:
    """Refuse extension, dictionary, union and all other types that are not values, at any depth."""
    for field in schema:
        _check_field(field, field.name)


def check_columns(metadata: pq.FileMetaData, columns: Sequence[str]) -> None:
    """Refuse, from the footer alone, columns whose few bytes would become gigabytes: long lists, long texts."""
    schema = metadata.schema
    prefixes = tuple(f"{column}." for column in columns)
    odd = [
        number
        for number in range(metadata.num_columns)
        if f"{schema.column(number).path}.".startswith(prefixes) and _may_grow(schema.column(number))
    ]
    for number in range(metadata.num_row_groups) if odd else ():
        group = metadata.row_group(number)
        for column in odd:
            _check_chunk(group.column(column), group.num_rows)


def _may_grow(column: pq.ColumnSchema) -> bool:
    """Lists and texts; of plain numbers there is one to a row."""
    return column.max_repetition_level > 0 or "BYTE_ARRAY" in column.physical_type


def _check_rows(metadata: pq.FileMetaData) -> None:
    check_limit("parquet_rows", metadata.num_rows, "it has rows:")
    check_limit("parquet_row_groups", metadata.num_row_groups, "it has row groups:")
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    if sum(rows) != metadata.num_rows or min(rows, default=0) < 0:
        raise pa.ArrowInvalid(f"its footer says {metadata.num_rows} rows, and {sum(rows)} in its row groups")


def _check_chunk(chunk: pq.ColumnChunkMetaData, num_rows: int) -> None:
    """A list of equal values takes a few bytes however long it is, and so does a text of one letter."""
    what = f"column '{chunk.path_in_schema[:80]}' has"
    check_limit("parquet_values", chunk.num_values, f"{what} values in a row group:")
    check_limit("parquet_row_values", chunk.num_values // max(num_rows, 1), f"{what} values in a row:")
    unpacked, packed = chunk.total_uncompressed_size, chunk.total_compressed_size
    if unpacked > UNPACKED_SHARE * max(packed, 1):
        check_limit("parquet_unpacked_bytes", unpacked, f"{what} bytes that unpack from {packed:,} to")


def _with_columns(where: str, file: IO[bytes], columns: Sequence[str]) -> pq.ParquetFile:
    try:
        parquet = open_parquet(file)
    except (TooMuchError, *UNREADABLE):
        raise
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    names = parquet.schema_arrow.names
    missing = [column for column in columns if column not in names]
    if missing:
        raise ValueError(
            f"{where} lacks the column '{missing[0]}' that meta/info.json names; it has "
            f"{', '.join(names)}; fetch the file anew, or correct meta/info.json"
        )
    check_columns(parquet.metadata, columns)
    return parquet


def _read_footer(file: IO[bytes]) -> bytes:
    """... footer | its length, 4 bytes | PAR1"""
    size = file.seek(0, 2)
    file.seek(max(size - TAIL_BYTES, 0))
    tail = file.read(TAIL_BYTES)
    if len(tail) < 8 or not tail.endswith(MAGIC):
        raise pa.ArrowInvalid(f"its {size} bytes do not end with {MAGIC.decode()}")
    (length,) = struct.unpack("<I", tail[-8:-4])
    if length > size - 8:
        raise pa.ArrowInvalid(f"its footer claims {length} bytes, the file has {size}")
    check_limit("parquet_footer_bytes", length, "its footer has bytes:")
    if length > len(tail) - 8:
        file.seek(size - 8 - length)
        return file.read(length)
    return tail[-8 - length : -8]


def _noted_schema(metadata: pq.FileMetaData) -> pa.Schema:
    """What the writer's Arrow types were, extension types as their storage; empty where no Arrow wrote the file."""
    note = (metadata.metadata or {}).get(INERT_NOTE)
    if note is None:
        return pa.schema([])
    try:
        message = base64.b64decode(note, validate=True)
    except binascii.Error as error:
        raise pa.ArrowInvalid(f"its note {NOTE.decode()} is damaged: {error}") from error
    return pa.ipc.read_schema(pa.BufferReader(message.replace(NAME, INERT_NAME)))


def _check_field(field: pa.Field, path: str) -> None:
    name = (field.metadata or {}).get(INERT_NAME, b"").decode(errors="replace")
    if name and name not in STORED_AS_PLAIN:
        raise _refused(path, f"the extension type {name!r}")
    kind = field.type
    if any(is_kind(kind) for is_kind in NESTED):
        for inner in map(kind.field, range(kind.num_fields)):
            _check_field(inner, f"{path}.{inner.name}")
    elif not any(is_kind(kind) for is_kind in PLAIN):
        raise _refused(path, f"the type {str(kind)[:80]}")


def _refused(path: str, kind: str) -> ValueError:
    return ValueError(
        f"column '{path}' has {kind}, which is not read, as such types can run code; a column holds numbers, text, "
        f"bytes or times, or lists and structs of them: write the file anew without that type, or do not use it"
    )
