"""Images in parquet: right rows in any order of reads, few in memory, and errors that name the damage."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlatune.data.frames import images
from vlatune.data.frames.images import OPEN_STREAMS, decode_image, read_images_into
from vlatune.data.frames.recorded import Recorded
from vlatune.data.read_spec import CameraSpec, frame_place
from vlatune.storage.root import Root

ROWS = 40
STRUCT = pa.struct({"bytes": pa.binary(), "path": pa.string()})
PLACE = "dataset 'd': episode 3, camera 'cam', rows.parquet"
CAMERA = CameraSpec("cam", "image", 6, 8)


def encoded(image: np.ndarray, form: str = "PNG", mode: str | None = None) -> bytes:
    out = io.BytesIO()
    Image.fromarray(image, mode).save(out, form)
    return out.getvalue()


def make_image(row: int) -> np.ndarray:
    return np.random.default_rng(row).integers(0, 256, (6, 8, 3), dtype=np.uint8)


def write(folder: Path, *, rows_per_group: int = 7, name: str = "rows.parquet", kind: pa.DataType = STRUCT) -> Root:
    made = [encoded(make_image(row)) for row in range(ROWS)]
    values = [{"bytes": data, "path": f"{row}.png"} for row, data in enumerate(made)] if kind == STRUCT else made
    table = pa.table({"index": pa.array(range(ROWS)), "cam": pa.array(values, kind)})
    pq.write_table(table, folder / name, row_group_size=rows_per_group)
    return Root(str(folder))


def read(root: Root, rows, *, name: str = "rows.parquet", size: tuple[int, int] = (6, 8)) -> np.ndarray:
    out = np.zeros((len(rows), 3, *size), np.uint8)
    read_images_into(root, name, CAMERA, rows, out, frame_place(root, 3, "cam", name))
    return out


@pytest.mark.parametrize("kind", [STRUCT, pa.binary(), pa.large_binary()], ids=["struct", "binary", "large"])
@pytest.mark.parametrize("rows_per_group", [1, 7, 100])
def test_rows_are_right_in_any_order_of_reads(rows_per_group, kind, tmp_path):
    root = write(tmp_path, rows_per_group=rows_per_group, kind=kind)
    for rows in ([0], [0, 1, 2], [3, 4, 30, 39], [39], [5, 5, 6], [2], list(range(ROWS))):
        expected = np.stack([make_image(row).transpose(2, 0, 1) for row in rows])
        assert np.array_equal(read(root, rows), expected), rows


def test_few_streams_stay_open_and_a_replaced_file_is_opened_again(tmp_path):
    names = [f"{number}.parquet" for number in range(OPEN_STREAMS + 3)]
    for name in names:
        read(write(tmp_path, name=name), [0], name=name)
    assert len(images._streams) <= OPEN_STREAMS
    root = Root(str(tmp_path))
    other = pa.table({"cam": pa.array([encoded(make_image(99))])})
    pq.write_table(other, tmp_path / names[-1])
    os.utime(tmp_path / names[-1], ns=(1, 1))
    assert np.array_equal(read(root, [0], name=names[-1])[0], make_image(99).transpose(2, 0, 1))


def test_memory_does_not_grow_with_the_row_group(tmp_path):
    """Another process reads 200 images of 1 MB in one row group, four in a page."""
    noise = np.random.default_rng(0).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    data = encoded(noise)
    table = pa.table({"cam": pa.array([data] * 200, pa.binary())})
    pq.write_table(table, tmp_path / "rows.parquet", use_dictionary=False, write_batch_size=4, compression="none")
    code = f"""
import numpy as np
from vlatune.data.frames.images import read_images_into
from vlatune.data.frames.recorded import Recorded
from vlatune.storage.root import Root
from vlatune.data.read_spec import CameraSpec, frame_place

def held():  # the most so far; psutil knows only what is held now, and getrusage begins with the parent's
    return [int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]

out = np.zeros((1, 3, 8, 8), np.uint8)
before = held()
for row in range(0, 200, 3):
    read_images_into(Root({str(tmp_path)!r}), "rows.parquet", CameraSpec("cam", "image", 6, 8), [row], out, "here")
print(held() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100, "MB; the row group has 216"


@pytest.mark.parametrize(
    ("mode", "form"), [("RGB", "PNG"), ("RGBA", "PNG"), ("L", "PNG"), ("P", "PNG"), ("RGB", "WEBP"), ("RGB", "BMP")]
)
def test_colour_images_of_any_mode_become_rgb(mode, form):
    image = Image.fromarray(make_image(0)).convert(mode)
    if mode == "RGBA":
        image.putalpha(10)  # nearly transparent; the colours count
    out = io.BytesIO()
    image.save(out, form, **({"lossless": True} if form == "WEBP" else {}))
    assert np.array_equal(decode_image(out.getvalue(), None, PLACE), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("data", [b"", b"not an image", encoded(make_image(0))[:60], b"GIF89a" + bytes(40)])
def test_an_image_that_cannot_be_decoded_is_named(data):
    with pytest.raises(
        ValueError, match=r"dataset 'd': episode 3, camera 'cam', rows.parquet: an image cannot be deco"
    ):
        decode_image(data, None, PLACE)


def test_depth_and_missing_images_are_named():
    depth = encoded(np.zeros((4, 4), np.uint16))
    with pytest.raises(ValueError, match="mode I;16 is depth, not colour; leave it out of cameras"):
        decode_image(depth, None, PLACE)
    with pytest.raises(ValueError, match="only the path of its image"):
        decode_image(None, None, PLACE)


def test_a_column_of_another_type_and_a_missing_one_are_named(tmp_path):
    pq.write_table(pa.table({"cam": pa.array(["a.png"])}), tmp_path / "rows.parquet")
    with pytest.raises(
        ValueError, match=r"episode 3, camera 'cam', rows.parquet: column 'cam' is of type string; an image is bytes"
    ):
        read(Root(str(tmp_path)), [0])
    pq.write_table(pa.table({"top": pa.array([b"x"])}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"episode 3, .*: there is no column 'cam', though meta/info.json names it"):
        read(Root(str(tmp_path)), [0], name="other.parquet")


def test_missing_rows_and_missing_or_damaged_files_are_named(tmp_path):
    root = write(tmp_path)
    with pytest.raises(ValueError, match=f"there is no row {ROWS}; meta and data disagree"):
        read(root, [ROWS])
    with pytest.raises(ValueError, match=r"camera 'cam', none.parquet: the file is missing; fetch it"):
        read(root, [0], name="none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"camera 'cam', bad.parquet: is not readable parquet"):
        read(root, [0], name="bad.parquet")


def test_an_image_of_another_size_is_rejected_even_if_it_would_be_resized(tmp_path):
    root, out = write(tmp_path), np.zeros((1, 3, 12, 12), np.uint8)
    read_images_into(root, "rows.parquet", replace(CAMERA, recorded=Recorded(6, 8)), [0], out, PLACE)
    with pytest.raises(ValueError, match=r"episode 3, camera 'cam', rows.parquet: its images are 6x8 .* has 8x6"):
        read_images_into(root, "rows.parquet", replace(CAMERA, recorded=Recorded(8, 6)), [0], out, PLACE)
