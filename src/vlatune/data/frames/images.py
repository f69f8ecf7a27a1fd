"""Read encoded images in parquet (`image` features) as frames at the policy's size.

Data files may hold gigabytes of images, so a column is streamed page by page. Recent streams stay
open, because the next unit of work usually continues where the last one ended. Reading starts at
the row group of the first wanted row; LeRobot writes one per episode, with up to 1,024 images per
page. Pages are read completely, so a stream may hold all encoded images of an episode and camera
twice.
"""

import io
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError

from vlatune.data.frames.recorded import MISSING, Recorded, check_size
from vlatune.data.frames.resize import resize_into
from vlatune.data.read_spec import CameraSpec, Unit, frame_place
from vlatune.storage.limits import check_limit
from vlatune.storage.parquet import UNREADABLE, check_columns, open_parquet
from vlatune.storage.root import Root

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""Accepted image formats; PIL's other readers are not safe for untrusted files."""
DAMAGED_IMAGE = (
    UnidentifiedImageError,
    OSError,
    SyntaxError,
    Image.DecompressionBombError,
    struct.error,
    OverflowError,
)
"""Exceptions that PIL raises for damaged images."""
BATCH_ROWS = 4
OPEN_STREAMS = 4
"""One per camera of most robots; a remote stream keeps up to 16 MiB."""

_streams: OrderedDict[tuple, "ImageStream"] = OrderedDict()


@dataclass(frozen=True)
class ParquetImages:
    """Images of one camera in the dataset's data files."""

    root: Root
    camera: CameraSpec

    def read_into(self, unit: Unit, frames: np.ndarray, times_s: np.ndarray, out: np.ndarray) -> int:
        place = frame_place(self.root, unit.episode_index, self.camera.name, unit.data_path)
        read_images_into(self.root, unit.data_path, self.camera, (unit.data_offset + frames).tolist(), out, place)
        return 0


def read_images_into(
    root: Root, file: str, camera: CameraSpec, rows: Sequence[int], out_NCHW: np.ndarray, place: str
) -> None:
    """Fill `out_NCHW` with the images in these rows (non-descending) of a data file."""
    for number, data in enumerate(_encoded(root, file, camera.name, rows, place)):
        resize_into(decode_image(data, camera.recorded, place), out_NCHW[number], pad=camera.pad)


def decode_image(data: bytes | None, recorded: Recorded | None, place: str) -> np.ndarray:
    """Decode an image to RGB, (H, W, 3); transparency is dropped, grey is replicated."""
    if data is None:
        raise ValueError(f"{place}: a row holds only the path of its image; embed the images, as LeRobot does")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(
                    f"{place}: an image of mode {image.mode} is depth, not colour; leave it out of cameras"
                )
            width, height = image.size  # from the header: a small file may decompress to a huge image
            check_limit("image_pixels", width * height, f"{place}: an image of {height}x{width} has pixels:")
            if recorded is not None:
                check_size(height, width, recorded, place)
            return np.asarray(image.convert("RGB"))
    except DAMAGED_IMAGE as error:
        raise ValueError(f"{place}: an image cannot be decoded ({error}); fetch the dataset again") from error


def _encoded(root: Root, file: str, column: str, rows: Sequence[int], place: str) -> Iterator[bytes | None]:
    stream = None
    try:
        key = (root.url, file, column, root.version(file))
        stream = _streams.pop(key, None) or ImageStream(root, file, column)
        for row in rows:
            yield stream.at(row)
    except FileNotFoundError as error:
        raise ValueError(f"{place}: {MISSING}") from error
    except PermissionError:
        raise
    except UNREADABLE as error:
        if stream is not None:
            stream.close()  # a remote file raises the original failure here
        raise ValueError(f"{place}: is not readable parquet ({error}); fetch the dataset again") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    _streams[key] = stream
    while len(_streams) > OPEN_STREAMS:
        _streams.popitem(last=False)[1].close()


class ImageStream:
    """Encoded images of one column of a data file; callers add the location to errors."""

    def __init__(self, root: Root, name: str, column: str) -> None:
        self._column = column
        self._file = root.open(name)
        self._parquet = open_parquet(self._file)
        check_image_columns(self._parquet, [column])
        check_columns(self._parquet.metadata, [column])
        groups = range(self._parquet.num_row_groups)
        self._group_ends = np.cumsum([self._parquet.metadata.row_group(group).num_rows for group in groups])
        self._group = -1
        self._begin = 0
        self._batch: pa.Array = pa.array([])
        self._batches: Iterator[pa.RecordBatch] = iter(())

    def at(self, row: int) -> bytes | None:
        group = int(np.searchsorted(self._group_ends, row, side="right"))
        if group == len(self._group_ends):
            raise ValueError(f"there is no row {row}; meta and data disagree: fetch the dataset again")
        if group != self._group or row < self._begin:
            self._start(group)
        while row >= self._begin + len(self._batch):
            self._begin += len(self._batch)
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError(f"row {row} is missing from its row group; fetch the file again")
            column = batch.column(0)
            self._batch = column.field("bytes") if pa.types.is_struct(column.type) else column
        return self._batch[row - self._begin].as_py()

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def _start(self, group: int) -> None:
        self._group, self._begin, self._batch = group, int(self._group_ends[group - 1]) if group else 0, pa.array([])
        self._batches = self._parquet.byte_batches(BATCH_ROWS, group, [self._column])


def check_image_columns(parquet: pq.ParquetFile, columns: Sequence[str]) -> None:
    """Reject a data file that lacks a camera's images or has another type of column."""
    schema = parquet.schema_arrow
    for column in columns:
        if column not in schema.names:
            raise ValueError(
                f"there is no column '{column}', though meta/info.json names it; there are {schema.names}; fetch the file again"
            )
        kind = schema.field(column).type
        inner = kind.field("bytes").type if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
        if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
            raise ValueError(
                f"column '{column}' is of type {kind}; an image is bytes, or a struct with bytes in it; fetch the file again"
            )
