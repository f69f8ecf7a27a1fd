"""Files of kept features: what is written is what is read, and what is not a run's own is refused with what to do."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlatune.dataset.storage.feature_files import (
    FEATURES,
    MANIFEST,
    PART_FRAMES,
    FeatureFiles,
    FeatureRow,
    num_parts,
    open_features,
    part_rows,
    stored_sizes,
)
from vlatune.dataset.storage.root import Root

LENGTH = PART_FRAMES + 6
ROWS = {
    "float32": FeatureRow("connector", (3, 2), "float32"),
    "bfloat16": FeatureRow("connector", (3, 2), "bfloat16"),
}


@pytest.fixture(params=ROWS)
def files(request, tmp_path) -> FeatureFiles:
    return FeatureFiles(Root(str(tmp_path / FEATURES), has_checksums=False), "0/1", ROWS[request.param])


def values(row: FeatureRow) -> np.ndarray:
    return np.arange(LENGTH * 6).reshape(LENGTH, 3, 2).astype(row.column_dtype)


def write_all(files: FeatureFiles) -> np.ndarray:
    whole = values(files.row)
    for part in range(num_parts(LENGTH)):
        files.write(12, part, whole[part * PART_FRAMES :][: part_rows(LENGTH, part)])
    return whole


def read(files: FeatureFiles, frames: list[int]) -> np.ndarray:
    out = np.empty((len(frames), *files.row.shape), files.row.column_dtype)
    files.read_into(12, LENGTH, np.array(frames), out)
    return out


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.integers(0, LENGTH - 1), min_size=1).map(sorted))
def test_any_frames_that_rise_are_read_back(files, frames):
    """One that comes twice, too, and over the end of a file."""
    whole = write_all(files)
    np.testing.assert_array_equal(read(files, frames), whole[frames])


def test_an_object_store_holds_them_as_well(files):
    remote = replace(files, root=Root("memory://bucket/features", has_checksums=False))
    whole = write_all(remote)
    np.testing.assert_array_equal(read(remote, [0, 5, LENGTH - 1]), whole[[0, 5, LENGTH - 1]])
    sizes = {remote.name(12, part): remote.part_bytes(LENGTH, part) for part in range(2)}
    assert stored_sizes(remote.root, "0/1") == sizes


def test_what_is_there_is_listed_with_its_size(files):
    assert stored_sizes(files.root, files.camera) == {}
    write_all(files)
    rest = LENGTH - PART_FRAMES
    assert stored_sizes(files.root, files.camera) == {
        "0/1/000012-00000.raw": PART_FRAMES * files.row.nbytes,
        "0/1/000012-00001.raw": rest * files.row.nbytes,
    }


@pytest.mark.parametrize("dtype", ROWS)
def test_numbers_that_are_not_finite_are_seen(dtype):
    row = ROWS[dtype]
    fine = np.arange(6).reshape(1, 3, 2).astype(row.column_dtype)
    assert row.is_finite(fine)
    for bad in ([np.nan, np.inf, -np.inf], [0x7F80, 0x7FC0, -128, -1])[dtype == "bfloat16"]:
        wrong = fine.copy()
        wrong[0, 1, 0] = bad
        assert not row.is_finite(wrong), bad


# Hostile files


def path_of(files: FeatureFiles, part: int = 0) -> Path:
    return Path(files.root.path, files.name(12, part))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_refused(files, change):
    write_all(files)
    expected = files.part_bytes(LENGTH, 0)
    with path_of(files).open("r+b") as file:
        file.truncate(expected + change)
    with pytest.raises(
        ValueError, match=rf"000012-00000.raw': {expected + change:,} bytes, expected {expected:,}; remove '.*features'"
    ):
        read(files, [0])


def test_numbers_that_are_not_finite_are_refused(files):
    whole = write_all(files)
    whole[3] = -1 if files.row.dtype == "bfloat16" else np.nan
    files.write(12, 0, whole[:PART_FRAMES])
    read(files, [0, 1])  # others of the file are fine
    with pytest.raises(
        ValueError, match=r"000012-00000.raw': rows 2 to 3 .* not finite; remove '.*features', and the same"
    ):
        read(files, [2, 3])


def test_a_file_that_is_gone_says_what_to_do(files):
    write_all(files)
    path_of(files, 1).unlink()
    with pytest.raises(ValueError, match=r"000012-00001.raw' are gone; start the same command again"):
        read(files, [LENGTH - 1])


def test_links_are_neither_read_nor_written_through(files, tmp_path):
    write_all(files)
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(files.part_bytes(LENGTH, 0)))
    link = path_of(files)
    link.unlink()
    link.symlink_to(secret)
    with pytest.raises(ValueError, match="is a link that leads out of"):
        read(files, [0])
    with pytest.raises(ValueError, match=r"000012-00000.raw' is a link, expected a file of the run's own"):
        stored_sizes(files.root, files.camera)
    files.write(12, 0, values(files.row)[:PART_FRAMES])  # replaces the link
    assert not link.is_symlink()
    assert not any(secret.read_bytes())


def test_a_camera_folder_that_is_a_link_is_refused(files, tmp_path):
    Path(files.root.path, "0").mkdir(parents=True)
    Path(files.root.path, "0/1").symlink_to(tmp_path)
    for call in (lambda: stored_sizes(files.root, files.camera), lambda: write_all(files)):
        with pytest.raises(ValueError, match="is a link, and nothing is written or deleted through links"):
            call()


# The manifest


def test_a_folder_of_other_things_is_refused_by_what_differs(files):
    open_features(files.root, {"base_weights": "a", "shape": (1, 2)})
    open_features(files.root, {"base_weights": "a", "shape": (1, 2)})
    with pytest.raises(
        ValueError, match=r"made of other things \(base_weights\); remove '.*features', and the same command"
    ):
        open_features(files.root, {"base_weights": "b", "shape": (1, 2)})


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b'{"base_weights": ' + b"[" * 100])
def test_a_manifest_that_is_none_is_refused(files, content):
    Path(files.root.path).mkdir(parents=True)
    Path(files.root.path, MANIFEST).write_bytes(content)
    with pytest.raises(ValueError, match=rf"features/{MANIFEST}'.*remove '.*features'"):
        open_features(files.root, {"base_weights": "a"})
