"""Read untrusted parquet files without running code and without filling memory.

- Arrow restores extension types from the footer's `ARROW:schema` entry, and the Python code of a registered type
  runs: ray's `arrow_pickled_object` unpickles. The key of this entry is renamed before Arrow parses the footer, so
  files are read by parquet's own types.
- A footer may state smaller sizes than its pages have. Arrow reads through `PageGuard`, which sums up the headers of
  the pages in the bytes that Arrow requests.
- A page may hold one long text that all rows refer to. Text is read as dictionaries (`texts`).
"""

import io
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from vlatune.storage.limits import UNPACKED_SHARE, TooMuchError, check_limit
from vlatune.storage.root import Root

MAGIC = b"PAR1"
TAIL_BYTES = 64 << 10
"""Bytes read at once from the end of a file; most footers fit."""
BUFFER_BYTES = 1 << 20
HEADER_BYTES, MAX_HEADER_BYTES = 2 << 10, 4 << 20
"""Initial and maximum size of a page header; long texts in its statistics make it large."""
SLACK_BYTES = 1 << 20
"""Tolerance, because writers differ in what they include in a column's size."""
DATA_PAGES = (5, 8)
"""Header fields of data pages, versions 1 and 2."""
SCHEMA_KEY, INERT_KEY = b"ARROW:schema", b"inert:schema"
"""The replacement has the same length, which keeps all offsets."""
MAX_LISTED = 8
"""Maximum number of column names in a message."""
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""Exceptions of damaged parquet files. Handle PermissionError first: it is an OSError, too."""
READ_OPTIONS = {"buffer_size": BUFFER_BYTES, "pre_buffer": False, "arrow_extensions_enabled": False}


class TextColumnError(ValueError):
    """Raised when numbers are read from a text column."""


@contextmanager
def opened(
    root: Root,
    name: str,
    columns: Sequence[str] = (),
    *,
    texts: Sequence[str] = (),
    remedy: str = "download the dataset again",
) -> Iterator["CheckedFile"]:
    """Open a file that has these columns; errors name the file. Columns in `texts` are read as dictionaries."""
    where = f"dataset '{root.url}': {name}"
    try:
        with root.open(name) as file:
            try:
                parquet = open_parquet(file, texts)
            except (TooMuchError, *UNREADABLE):
                raise
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            missing = [column for column in columns if column not in parquet.schema_arrow.names]
            if missing:
                names = parquet.schema_arrow.names
                listed = ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")
                raise ValueError(
                    f"{where} lacks the column '{missing[0]}' (it has {listed}); download the file again, or correct "
                    f"meta/info.json"
                )
            parquet.require_numbers(columns)
            check_columns(parquet.metadata, [*columns, *texts])
            yield parquet
    except PermissionError:
        raise
    except TextColumnError as error:
        raise ValueError(f"{where}, {error}; {remedy}") from error
    except TooMuchError as error:
        raise TooMuchError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error
    except FileNotFoundError as error:
        raise ValueError(f"{where} is missing; {remedy}") from error
    except UNREADABLE as error:
        raise ValueError(f"{where} is not readable parquet ({error}); {remedy}") from error


def open_parquet(file: IO[bytes], texts: Sequence[str] = ()) -> "CheckedFile":
    """Open a file; errors do not name it, callers add the context."""
    footer = _read_footer(file).replace(SCHEMA_KEY, INERT_KEY)
    footer_only = MAGIC + footer + struct.pack("<I", len(footer)) + MAGIC
    plain = pq.ParquetFile(pa.BufferReader(footer_only), arrow_extensions_enabled=False)
    _check_footer(file, plain.metadata)
    for name, times in Counter(plain.schema_arrow.names).most_common(1):
        if times > 1:
            raise ValueError(f"{times} columns are named '{name[:80]}', expected one; rename or remove the others")
    return CheckedFile(PageGuard(file, plain.metadata), plain.metadata, texts)


class CheckedFile(pq.ParquetFile):
    """Parquet file that announces to its guard which columns will be read.

    It reads on one thread: after a failed read on several threads, the others may call into a
    finalized interpreter and abort it.
    """

    def __init__(self, guard: "PageGuard", metadata: pq.FileMetaData, texts: Sequence[str] = ()) -> None:
        super().__init__(guard, metadata=metadata, read_dictionary=leaves(metadata.schema, texts), **READ_OPTIONS)
        self.guard = guard
        self.text_columns = frozenset(field.name for field in self.schema_arrow if _has_text(field.type))
        """Columns that contain text or bytes at any depth and are not read as dictionaries."""

    def read(self, columns: list[str] | None = None) -> pa.Table:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = [self.read_row_group(group, columns) for group in range(self.num_row_groups)]
        return pa.concat_tables(parts) if parts else super().read(columns)

    def read_row_group(self, i: int, columns: list[str] | None = None) -> pa.Table:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.require_numbers(columns)
        self.guard.expect(i, columns)
        return super().read_row_group(i, columns, use_threads=False)

    def iter_batches(self, batch_size: int, columns: list[str], row_groups: Sequence[int] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield batches of numbers; no batch spans two row groups."""
        self.require_numbers(columns)
        for group in range(self.num_row_groups) if row_groups is None else row_groups:
            yield from self.byte_batches(batch_size, group, columns)

    def byte_batches(self, batch_size: int, row_group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield batches of columns of any type; a batch of bytes may be `batch_size` times as large as its pages."""
        self.guard.expect(row_group, columns)
        return super().iter_batches(batch_size, [row_group], columns, use_threads=False)

    def require_numbers(self, columns: Sequence[str] | None) -> None:
        texts = sorted(self.text_columns & set(self.schema_arrow.names if columns is None else columns))
        if texts:
            raise TextColumnError(f"column '{texts[0][:80]}' holds text or bytes, expected numbers")


class PageGuard(io.RawIOBase):
    """File wrapper that checks the headers of all pages that begin in the bytes it returns.

    Arrow reads each column of a row group from its first page, so no header is missed.
    """

    def __init__(self, file: IO[bytes], metadata: pq.FileMetaData) -> None:
        super().__init__()
        self._file, self._metadata = file, metadata
        self._chunks: list[ChunkPages] = []

    def expect(self, group: int, columns: Sequence[str] | None) -> None:
        """Add columns of a row group that will be read; an earlier reader may still be active."""
        row_group = self._metadata.row_group(group)
        schema = self._metadata.schema
        numbers = range(len(schema)) if columns is None else leaves(schema, columns)
        new = [ChunkPages(row_group.column(number)) for number in numbers] if row_group.num_rows else []
        self._chunks = [chunk for chunk in self._chunks if not chunk.is_done] + new

    def read(self, size: int = -1, /) -> bytes:
        begin = self._file.tell()
        data = self._file.read(size)
        end = begin + len(data)
        for chunk in self._chunks:
            if chunk.begin < end and begin < chunk.end:
                chunk.check_until(self._file, end)
        self._file.seek(end)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class ChunkPages:
    """Checks that the pages of a column chunk hold no more than the footer states."""

    def __init__(self, chunk: pq.ColumnChunkMetaData) -> None:
        self._chunk = chunk
        self.begin = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            self.begin = min(self.begin, chunk.dictionary_page_offset)
        self.end = self.begin + chunk.total_compressed_size
        self._at = self.begin
        self._bytes = self._values = 0

    @property
    def is_done(self) -> bool:
        return self._at >= self.end

    def check_until(self, file: IO[bytes], end: int) -> None:
        """Check the pages that begin before `end`."""
        name = f"column '{self._chunk.path_in_schema[:80]}'"
        max_values, stated_bytes = self._chunk.num_values, self._chunk.total_uncompressed_size
        while self._at < min(self.end, end):
            header, at = _page_header(file, self._at, self.end)
            values = [header[field].get(1) for field in DATA_PAGES if isinstance(header.get(field), dict)]
            unpacked, packed = header.get(2, -1), header.get(3, -1)
            if not all(isinstance(number, int) and number >= 0 for number in (unpacked, packed, *values)):
                raise pa.ArrowInvalid(f"{name}: a page has no size")
            self._at, self._bytes, self._values = at + packed, self._bytes + unpacked, self._values + sum(values)
            if self._values > max_values or self._bytes > 2 * stated_bytes + SLACK_BYTES:
                raise TooMuchError(
                    f"{name}: its pages hold at least {self._values:,} values and {self._bytes:,} bytes, but its footer "
                    f"states {max_values:,} and {stated_bytes:,}; download the file again"
                )


def _page_header(file: IO[bytes], at: int, end: int) -> tuple[dict[int, Any], int]:
    """Parse a page header into fields by number; return them and the header's end."""
    size = HEADER_BYTES
    while size <= MAX_HEADER_BYTES:
        file.seek(at)
        data = file.read(min(size, end - at))
        try:
            fields, used = _parse_struct(data, 0, 0)
            return fields, at + used
        except IndexError:
            if len(data) < size:
                break
            size *= 16
    raise pa.ArrowInvalid(f"the header of a page at byte {at} does not end")


def _parse_struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Parse a struct in Thrift's compact protocol: (field delta, type), value, ..., zero."""
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
        delta, kind = data[at] >> 4, data[at] & 15
        at += 1
        if delta:
            number += delta
        else:
            number, at = _parse_int(data, at)
        if kind in (1, 2):  # true, false
            fields[number] = kind == 1
        elif kind == 3:  # byte
            fields[number], at = data[at], at + 1
        elif kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            fields[number], at = _parse_int(data, at)
        elif kind == 7:  # double
            at += 8
        elif kind == 8:  # bytes
            length, at = _parse_varint(data, at)
            at += length
        elif kind == 12 and depth < 8:
            fields[number], at = _parse_struct(data, at, depth + 1)
        else:  # page headers have no lists or maps
            raise pa.ArrowInvalid("the header of a page is damaged")
    return fields, at + 1


def _parse_int(data: bytes, at: int) -> tuple[int, int]:
    value, at = _parse_varint(data, at)
    return (value >> 1) ^ -(value & 1), at  # zigzag


def _parse_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise pa.ArrowInvalid("the header of a page is damaged")


def check_columns(metadata: pq.FileMetaData, columns: Sequence[str]) -> None:
    """Reject lists and texts that would expand to gigabytes, by the footer."""
    for number in leaves(metadata.schema, columns):
        column = metadata.schema.column(number)
        if not column.max_repetition_level and "BYTE_ARRAY" not in column.physical_type:
            continue
        what, packed, unpacked = f"column '{column.path[:80]}' has", 0, 0
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            chunk = group.column(number)
            check_limit("parquet_values", chunk.num_values, f"{what} values in a row group:")
            check_limit("parquet_row_values", chunk.num_values // max(group.num_rows, 1), f"{what} values in a row:")
            fixed_bytes = chunk.num_values * max(column.length or 0, 0)
            unpacked += max(chunk.total_uncompressed_size, fixed_bytes)
            packed += chunk.total_compressed_size
        if unpacked > UNPACKED_SHARE * max(packed, 1):
            check_limit("parquet_unpacked_bytes", unpacked, f"{what} bytes that unpack from {packed:,} to")


def leaves(schema: pq.ParquetSchema, columns: Sequence[str]) -> list[int]:
    """Return the indices of the parquet columns (leaves) of these columns."""
    prefixes = tuple(f"{column}." for column in columns)
    return [number for number in range(len(schema)) if f"{schema.column(number).path}.".startswith(prefixes)]


def _has_text(kind: pa.DataType) -> bool:
    if kind.num_fields:
        return any(_has_text(kind.field(number).type) for number in range(kind.num_fields))
    return types.is_string(kind) or types.is_binary(kind)


class _ReadStartedError(Exception):
    """Raised once Arrow has validated the footer and starts to read."""


class _SeekOnly(PageGuard):
    def read(self, size: int = -1, /) -> bytes:
        raise _ReadStartedError


def _check_footer(file: IO[bytes], metadata: pq.FileMetaData) -> None:
    check_limit("parquet_rows", metadata.num_rows, "it has rows:")
    check_limit("parquet_row_groups", metadata.num_row_groups, "it has row groups:")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    rows = [group.num_rows for group in groups]
    if sum(rows) != metadata.num_rows or min(rows, default=0) < 0:
        raise pa.ArrowInvalid(f"its footer states {metadata.num_rows} rows, and {sum(rows)} in its row groups")
    if any(group.num_columns != metadata.num_columns for group in groups):
        raise pa.ArrowInvalid(f"a row group does not have the {metadata.num_columns} columns of the schema")
    if groups and metadata.num_columns:
        # `RowGroupMetaData.column` aborts the process if a chunk's metadata is invalid. With `pre_buffer` Arrow
        # validates all chunks, and raises, before it reads the first byte.
        guard = _SeekOnly(file, metadata)
        reader = pq.ParquetFile(guard, metadata=metadata, pre_buffer=True, arrow_extensions_enabled=False)
        with suppress(_ReadStartedError):
            next(reader.iter_batches(1, use_threads=False), None)


def _read_footer(file: IO[bytes]) -> bytes:
    """Return the footer of: ... footer | its length, 4 bytes | PAR1"""
    size = file.seek(0, 2)
    file.seek(max(size - TAIL_BYTES, 0))
    tail = file.read(TAIL_BYTES)
    if len(tail) < 8 or not tail.endswith(MAGIC):
        raise pa.ArrowInvalid(f"its {size} bytes do not end with {MAGIC.decode()}")
    (length,) = struct.unpack("<I", tail[-8:-4])
    if length > size - 8:
        raise pa.ArrowInvalid(f"its footer states {length} bytes, the file has {size}")
    check_limit("parquet_footer_bytes", length, "its footer has bytes:")
    if length > len(tail) - 8:
        file.seek(size - 8 - length)
        return file.read(length)
    return tail[-8 - length : -8]
