"""Pictures that lie in parquet, encoded (`image` features: PNG as LeRobot writes them) -> frames at the policy's size.

A data file may hold gigabytes of pictures, so a column is streamed, page by page. The streams used last stay open, as
the next unit of work mostly goes on where this one ended. Reading begins at the row group that holds the first wanted
row; LeRobot writes one per episode, with up to 1,024 pictures in a page. A page cannot be read in part: such a stream
holds twice the encoded pictures of an episode and camera (measured: 2.1 times).
"""

import io
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, UnidentifiedImageError

from vlatune.dataset.meta.listing import missing_remedy
from vlatune.dataset.storage.parquet import UNREADABLE, check_columns, open_parquet
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video.decoder import VideoPlace
from vlatune.dataset.video.recorded import check_size
from vlatune.limits import check_limit

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""What a picture may be encoded as; PIL's other readers are not for files of strangers."""
NOT_A_PICTURE = (
    UnidentifiedImageError,
    OSError,
    SyntaxError,
    Image.DecompressionBombError,
    struct.error,
    OverflowError,
)
"""What PIL raises for bytes that are damaged."""
BATCH_ROWS = 4
OPEN_STREAMS = 4
"""One per camera of most robots; a remote one keeps up to 16 MiB."""

_streams: OrderedDict[tuple, "ImageStream"] = OrderedDict()


def read_images_into(root: Root, rows: Sequence[int], out_NCHW: np.ndarray, place: VideoPlace) -> None:
    """Fill `out_NCHW` with the pictures in these rows of a data file; rows must not fall."""
    for number, data in enumerate(_encoded(root, rows, place)):
        place.letterbox.into(decode_image(data, place), out_NCHW[number])


def decode_image(data: bytes | None, place: VideoPlace) -> np.ndarray:
    """RGB, (H, W, 3); transparency is dropped, grey is spread over the channels."""
    if data is None:
        raise ValueError(f"{place}: a row holds no picture, only its path; embed the pictures, as LeRobot does")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(
                    f"{place}: a picture of mode {image.mode} is depth, not colour; leave it out of cameras"
                )
            _check_before_decoding(image, place)
            return np.asarray(image.convert("RGB"))
    except NOT_A_PICTURE as error:
        raise ValueError(f"{place}: a picture cannot be decoded ({error}); fetch the dataset anew") from error


def _check_before_decoding(image: Image.Image, place: VideoPlace) -> None:
    """By its header: a few kB may hold hundreds of millions of equal pixels."""
    width, height = image.size
    check_limit("picture_pixels", width * height, f"{place}: a picture of {height}x{width} has pixels:")
    if place.recorded is not None:
        check_size(height, width, place.recorded, place)


def _encoded(root: Root, rows: Sequence[int], place: VideoPlace) -> Iterator[bytes | None]:
    stream = None
    try:
        key = (root.url, place.file, place.camera, root.version(place.file))
        stream = _streams.pop(key, None) or ImageStream(root, place.file, place.camera)
        for row in rows:
            yield stream.at(row)
    except FileNotFoundError as error:
        raise ValueError(f"{place}: the file is missing; {missing_remedy(root, place.file)}") from error
    except PermissionError:
        raise
    except UNREADABLE as error:
        if stream is not None:
            stream.close()  # a remote file tells here what really happened
        raise ValueError(f"{place}: is not readable parquet ({error}); fetch the dataset anew") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    _streams[key] = stream
    while len(_streams) > OPEN_STREAMS:
        _streams.popitem(last=False)[1].close()


class ImageStream:
    """The encoded pictures of one column of one data file: cheap forwards, one row group back otherwise.

    Its errors do not name the place: the caller knows more of it.
    """

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
            raise ValueError(f"there is no row {row}; meta and data disagree: fetch the dataset anew")
        if group != self._group or row < self._begin:
            self._start(group)
        while row >= self._begin + len(self._batch):
            self._begin += len(self._batch)
            batch = next(self._batches, None)
            if batch is None:
                raise ValueError(f"row {row} is missing from its row group; fetch the file anew")
            column = batch.column(0)
            self._batch = column.field("bytes") if pa.types.is_struct(column.type) else column
        return self._batch[row - self._begin].as_py()

    def close(self) -> None:
        self._file.__exit__(None, None, None)

    def _start(self, group: int) -> None:
        self._group, self._begin, self._batch = group, int(self._group_ends[group - 1]) if group else 0, pa.array([])
        self._batches = self._parquet.iter_batches(
            BATCH_ROWS, row_groups=[group], columns=[self._column], use_threads=False
        )


def check_image_columns(parquet: pq.ParquetFile, columns: Sequence[str]) -> None:
    """Refuse a data file that lacks the pictures of a camera, or holds something else under its name."""
    schema = parquet.schema_arrow
    for column in columns:
        if column not in schema.names:
            raise ValueError(
                f"there is no column '{column}', though meta/info.json names it; there are {schema.names}; fetch the file anew"
            )
        kind = schema.field(column).type
        inner = kind.field("bytes").type if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
        if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
            raise ValueError(
                f"column '{column}' is of type {kind}; a picture is bytes, or a struct with bytes in it; fetch the file anew"
            )
