"""Statistics: the dataset's own if it has them, else exact ones from its rows."""

import json
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from vlatune.data.meta.dataset_meta import load_meta, meta_v21
from vlatune.data.meta.stats import QUANTILES, compute_stats, feature_stats, measure_rows, read_parts
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.storage.root import Root

KEYS = ("observation.state", "action")


def rows_of(folder: Path, key: str) -> np.ndarray:
    """Return all rows of a feature, read without vlatune."""
    tables = [pq.read_table(path) for path in sorted((folder / "data").glob("*/*.parquet"))]
    return np.array([row for table in tables for row in table.column(key).to_pylist()])


def write_episode_stats(folder: Path, parts: list[np.ndarray]) -> Root:
    """Write a v2.1 `episodes_stats.jsonl` whose episodes have these rows of one feature."""
    (folder / "meta").mkdir(exist_ok=True)
    lines = []
    for number, part in enumerate(parts):
        moments = {name: getattr(part, name)(axis=0).tolist() for name in ("min", "max", "mean", "std")}
        lines.append({"episode_index": number, "stats": {"action": {**moments, "count": [len(part)]}}})
    (folder / "meta/episodes_stats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Root(str(folder))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_pooling_equals_numpy_for_episodes_of_any_length(tmp_path_factory, lengths, seed):
    rng = np.random.default_rng(seed)
    parts = [rng.normal(rng.normal(0, 5), rng.uniform(0.1, 3), (length, 3)) for length in lengths]
    pooled = meta_v21.read_stats(write_episode_stats(tmp_path_factory.mktemp("pooled"), parts))["action"]
    rows = np.concatenate(parts)
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(pooled[name], getattr(rows, name)(axis=0), rtol=1e-6, atol=1e-6)
    assert pooled["count"].tolist() == [len(rows)]


@pytest.mark.parametrize("key", KEYS)
def test_quantiles_that_v21_lacks_are_computed_from_its_rows(key, dataset_v21):
    stats = feature_stats([load_meta(str(dataset_v21))], key, ("q01", "q99"))
    expected = np.quantile(rows_of(dataset_v21, key).astype(np.float64), [0.01, 0.99], axis=0)
    np.testing.assert_allclose([stats["q01"], stats["q99"]], expected, rtol=1e-12)


def test_a_datasets_own_statistics_are_used_unchanged(dataset_v3):
    meta = load_meta(str(dataset_v3))
    own = {"q01": np.array([-5.0, -6.0]), "q99": np.array([7.0, 8.0]), "mean": np.array([1.0, 2.0])}
    stats = feature_stats([replace(meta, stats={"action": own})], "action", ("q01", "q99"))
    assert list(stats) == ["q01", "q99"]
    assert stats["q01"] is own["q01"]
    assert stats["q99"] is own["q99"]


def test_one_missing_statistic_is_enough_to_compute_them_all(dataset_v3):
    """A pair from two sources could have its low above its high."""
    meta = load_meta(str(dataset_v3))
    stats = feature_stats([replace(meta, stats={"action": {"q01": np.array([99.0, 99.0])}})], "action", ("q01", "q99"))
    np.testing.assert_allclose(stats["q01"], np.quantile(rows_of(dataset_v3, "action"), 0.01, axis=0), rtol=1e-6)


def test_several_datasets_are_measured_together(dataset_v3, tmp_path):
    spec = SyntheticSpec(episodes=2, frames=5, cameras=1, height=64, width=64, seed=9)
    make_dataset(tmp_path / "other", spec)
    metas = [load_meta(str(folder)) for folder in (dataset_v3, tmp_path / "other")]
    rows = np.concatenate([rows_of(folder, "action") for folder in (dataset_v3, tmp_path / "other")])
    stats = feature_stats(metas, "action", ("q01", "q99", "mean", "std"))
    np.testing.assert_allclose(stats["mean"], rows.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(stats["std"], rows.std(axis=0), rtol=1e-6)
    np.testing.assert_allclose(stats["q99"], np.quantile(rows, 0.99, axis=0), rtol=1e-6)


def test_statistics_of_many_episodes_do_not_stay_in_memory(tmp_path):
    """28 MB of text are read in parts."""
    rng = np.random.default_rng(0)
    line = json.dumps(
        {
            "stats": {
                "action": {name: rng.random(70).tolist() for name in ("min", "max", "mean", "std")} | {"count": [9]}
            }
        }
    )
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/episodes_stats.jsonl").write_text("\n".join([line] * 5000))
    tracemalloc.start()
    try:
        stats = meta_v21.read_stats(Root(str(tmp_path)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stats["action"]["count"].tolist() == [45_000]
    assert (tmp_path / "meta/episodes_stats.jsonl").stat().st_size > 25e6
    assert peak_bytes < 14e6


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_lines_are_split_correctly_for_any_size_of_reads(size, tmp_path, monkeypatch):
    monkeypatch.setattr(meta_v21, "CHUNK_BYTES", size)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{"a": "\\u00e9 and more"}\r\n{"a": 3}')
    found = list(meta_v21.read_lines(Root(str(tmp_path)), "rows.jsonl"))
    assert [row["a"] for _, row in found] == [1, "é and more", 3]
    assert [where.rpartition(" ")[2] for where, _ in found] == ["1", "3", "4"]


def test_episodes_that_are_left_out_are_not_read(dataset_v3, tmp_path):
    folder = Path(shutil.copytree(dataset_v3, tmp_path / "damaged"))
    meta = load_meta(str(folder))
    (folder / meta.data_path(6)).write_bytes(b"")
    with pytest.raises(ValueError, match="is not readable parquet"):
        np.concatenate(list(read_parts(meta, "action")))
    kept = np.concatenate(list(read_parts(replace(meta, left_out=frozenset({1, 5, 6})), "action")))
    rows, begin, length = rows_of(dataset_v3, "action"), meta.episodes.from_row, meta.episodes.length
    expected = np.concatenate([rows[begin[one] : begin[one] + length[one]] for one in (0, 2, 3, 4)])
    assert np.array_equal(kept, expected)


@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(
        np.float32, st.tuples(st.integers(1, 40), st.integers(1, 3)), elements=st.floats(-(2.0**90), 2.0**90, width=32)
    ),
    st.integers(1, 5),
)
def test_statistics_of_rows_that_are_read_in_parts_equal_numpys(values, num_parts):
    parts = np.array_split(values, num_parts)
    measured, expected = measure_rows(parts), compute_stats(values)
    for name in ("min", "max", *QUANTILES):
        assert np.array_equal(measured[name], expected[name]), name
    scale = np.abs(values).max() + 1
    for name in ("mean", "std"):
        np.testing.assert_allclose(measured[name], expected[name], rtol=1e-9, atol=1e-9 * scale)


def test_a_value_that_is_no_number_leaves_its_dim_without_statistics():
    values = np.array([[1, 2, 3], [4, np.nan, 6], [7, 8, np.inf]], np.float32)
    for stat in measure_rows([values]).values():
        assert np.isfinite(stat).tolist() == [True, False, False]
