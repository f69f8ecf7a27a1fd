"""The store of kept prefixes returns what was written for this sample and prompt, or nothing."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from vlatune.batch import TOKEN_MASK, TOKENS, Columns
from vlatune.data.frames.cache import FOLDER_BYTES, CacheSettings, part_identity
from vlatune.data.frames.prefix_store import PrefixLayout, PrefixSettings, PrefixStore
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.reader import make_unit
from vlatune.data.transforms import cut_prompts
from vlatune.feed.ray_blocks import HAS_IMAGES, read_blocks
from vlatune.feed.read_plan import Request, make_read_specs

LAYOUT = PrefixLayout("test", image_tokens=3, max_prompt_tokens=20, width=5, dtype="bfloat16")


def open_store(folder: Path, max_bytes: int = 1 << 30, identity: bytes = b"data") -> PrefixStore:
    cache = CacheSettings(str(folder), max_bytes, 0, time.time())
    return PrefixStore(PrefixSettings(cache, LAYOUT, (identity,), ()))


def make_columns(lengths: list[int], seed: int = 0) -> Columns:
    mask = np.arange(20) < np.array(lengths)[:, None]
    rows = len(lengths)
    return {
        TOKENS: np.random.default_rng(seed).integers(1, 100, mask.shape) * mask,
        TOKEN_MASK: mask,
        "dataset_index": np.zeros(rows, np.int64),
        "episode_index": np.arange(rows),
        "frame_index": np.arange(rows) + 7,
    }


def make_row(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, (tokens, LAYOUT.width)).astype(LAYOUT.column_dtype)


def fill(store: PrefixStore, columns: Columns) -> list[np.ndarray]:
    rows = [make_row(key.tokens, seed) for seed, key in enumerate(store.keys(columns))]
    for key, row in zip(store.keys(columns), rows, strict=True):
        store.write(key, row)
    return rows


def read(store: PrefixStore, columns: Columns) -> list[np.ndarray | None]:
    outs = [(key, np.zeros((key.tokens, LAYOUT.width), LAYOUT.column_dtype)) for key in store.keys(columns)]
    return [out if store.read(key, out) else None for key, out in outs]


@pytest.mark.parametrize("lengths", [[1, 8, 9, 20], [0, 17], [20]], ids=str)
def test_rows_have_the_length_of_their_prompt_and_are_returned(tmp_path, lengths: list[int]):
    store, columns = open_store(tmp_path), make_columns(lengths)
    assert read(store, columns) == [None] * len(lengths)
    rows = fill(store, columns)
    np.testing.assert_array_equal(np.concatenate(read(store, columns)), np.concatenate(rows))
    longest = max(len(row) for row in rows)
    assert longest == LAYOUT.image_tokens + cut_prompts(columns)[TOKENS].shape[1]
    assert max(path.stat().st_size for path in tmp_path.rglob("*.part")) <= 4096 + LAYOUT.max_bytes


def test_another_prompt_dataset_or_sample_is_missing(tmp_path):
    columns = make_columns([9, 9])
    fill(open_store(tmp_path), columns)
    for other in (make_columns([9, 9], seed=1), columns | {"frame_index": columns["frame_index"] + 1}):
        assert read(open_store(tmp_path), other) == [None, None]
    assert read(open_store(tmp_path, identity=b"other"), columns) == [None, None]


@pytest.mark.parametrize("damage", ["byte", "truncated", "swapped", "link", "folder"])
def test_damaged_rows_are_missing_and_can_be_written_again(tmp_path, damage: str):
    folder = tmp_path / "store"
    store, columns = open_store(folder), make_columns([9, 9])
    rows = fill(store, columns)
    first, second = (folder / key.part.name for key in store.keys(columns))
    data = first.read_bytes()
    first.unlink()
    if damage == "byte":
        first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncated":
        first.write_bytes(data[:-8])
    elif damage == "swapped":
        first.write_bytes(second.read_bytes())
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        first.symlink_to(tmp_path / "elsewhere")
    else:
        first.mkdir()
    found = read(store, columns)
    assert found[0] is None
    np.testing.assert_array_equal(found[1], rows[1])
    if damage != "folder":
        fill(store, columns)
        np.testing.assert_array_equal(np.stack(read(store, columns)), np.stack(rows))
    if damage == "link":
        assert (tmp_path / "elsewhere").read_bytes() == data


def test_rows_stay_within_the_budget(tmp_path):
    columns = make_columns([20] * 10)
    part_bytes = next(open_store(tmp_path).keys(columns)).part.disk_bytes
    store = open_store(tmp_path, FOLDER_BYTES + 5 * part_bytes)
    fill(store, columns)
    assert sum(row is not None for row in read(store, columns)) == 5


def test_images_of_kept_rows_are_not_read(dataset_v3, tmp_path):
    """The videos are gone, so that reading an image would fail."""
    copy = shutil.copytree(dataset_v3, tmp_path / "dataset")
    meta = load_meta(str(copy))
    (spec,), _ = make_read_specs([meta], Request())
    frames = np.arange(4)
    unit = make_unit(meta, spec, 0, frames, frames + 100)
    store = open_store(tmp_path / "store")
    columns = make_columns([9] * 4) | {"episode_index": np.full(4, unit.episode_index), "frame_index": frames}
    fill(store, {key: values[1:3] for key, values in columns.items()})
    computed, kept = store.split(unit)
    assert (computed.frames.tolist(), computed.skips_images) == ([0, 3], False)
    assert (kept.frames.tolist(), kept.slots.tolist(), kept.skips_images) == ([1, 2], [101, 102], True)
    (block,) = read_blocks([spec], (), [[computed, kept]])
    assert block[HAS_IMAGES].tolist() == [True, True, False, False]
    camera = spec.cameras[0].column
    assert [bool(image.any()) for image in block[camera]] == block[HAS_IMAGES].tolist()
    shutil.rmtree(copy / "videos")
    (block,) = read_blocks([spec], (), [[kept]])
    assert block["frame_index"].tolist() == [1, 2]
    with pytest.raises((ValueError, OSError)):
        list(read_blocks([spec], (), [[computed]]))


def test_identities_depend_on_the_kernels():
    settings = PrefixSettings(CacheSettings("", 0, 0, 0.0), LAYOUT, (part_identity("a"), part_identity("b")), ())
    cpu, gpu = settings.on_device("cpu", 2), settings.on_device("cuda", "L4")
    assert len({*settings.identities, *cpu.identities, *gpu.identities}) == 6
