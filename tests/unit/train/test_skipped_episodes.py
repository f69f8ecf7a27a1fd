"""`--dataset.on_bad_episode=skip`: the same episodes for every worker, every restart and the evaluation."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.health.bad_episodes import BadEpisode
from vlatune.run.run_folder import SKIPPED_FILE
from vlatune.run_setup import Setup, make_setup, read_skipped, write_skipped

WRIST_2 = "videos/observation.images.wrist/chunk-000/file-002.mp4"


@pytest.fixture
def root(dataset_v3, tmp_path) -> Path:
    """Seven episodes; the video of the last is missing."""
    folder = Path(shutil.copytree(dataset_v3, tmp_path / "damaged"))
    (folder / WRIST_2).unlink()
    return folder


@pytest.fixture
def config(root, small_base, tmp_path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(root),), on_bad_episode="skip", eval_split=0.3),
        policy=PolicyConfig(path=str(small_base)),
        output_dir=str(tmp_path / "run"),
        batch_size=4,
    )


def begin(config: RunConfig, setup: Setup) -> None:
    """Write what a run writes to its folder when it starts."""
    config.run_dir.mkdir()
    (config.run_dir / "config.json").write_text("{}")
    write_skipped(config.run_dir, setup.skipped)


def restore_video(root: Path, dataset_v3: Path) -> None:
    shutil.copy(dataset_v3 / WRIST_2, root / WRIST_2)


def test_a_bad_episode_is_neither_trained_on_nor_held_out(config, root):
    setup = make_setup(config)
    assert [(bad.dataset_index, bad.dataset, bad.episode) for bad in setup.skipped] == [(0, str(root), 6)]
    assert f"camera 'observation.images.wrist', {WRIST_2}: the file is missing" in setup.skipped[0].reason
    assert sorted([*setup.training.position, *setup.held_out.position]) == [0, 1, 2, 3, 4, 5]
    assert setup.order.lengths == tuple(setup.training.length.tolist())
    assert setup.metas[0].left_out == {6}


def test_by_default_a_bad_episode_is_an_error(config):
    with pytest.raises(ValueError, match=f"{WRIST_2} is missing"):
        make_setup(replace(config, dataset=replace(config.dataset, on_bad_episode="fail")), preflight=True)


def test_a_resumed_run_skips_the_same_episodes_although_the_data_was_fixed(config, root, dataset_v3):
    first = make_setup(config, preflight=True)
    begin(config, first)
    restore_video(root, dataset_v3)
    again = make_setup(config, preflight=True)
    assert again.skipped == first.skipped
    assert again.order == first.order
    for name in ("dataset", "position", "length"):
        assert np.array_equal(getattr(again.held_out, name), getattr(first.held_out, name))


def test_a_run_that_never_started_checks_all_episodes_again(config, root, dataset_v3):
    assert len(make_setup(config, preflight=True).skipped) == 1
    restore_video(root, dataset_v3)
    assert make_setup(config, preflight=True).skipped == ()


def test_the_list_is_written_once_and_read_back(tmp_path):
    bad = (BadEpisode(0, "a", 3, "no frames"), BadEpisode(1, "s3://b", 12, "no rows"))
    write_skipped(tmp_path, bad)
    write_skipped(tmp_path, ())
    assert read_skipped(tmp_path) == bad
    reported = json.loads((tmp_path / SKIPPED_FILE).read_text())["skipped_episodes"]
    assert reported[1] == {"dataset_index": 1, "dataset": "s3://b", "episode": 12, "reason": "no rows"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"skipped_episodes": [{"episode": 1}]}', '{"skipped_episodes": 3}'])
def test_a_list_that_cannot_be_read_stops_the_run(text, tmp_path):
    (tmp_path / SKIPPED_FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"{SKIPPED_FILE}' is not readable .*; restore it"):
        read_skipped(tmp_path)


def test_statistics_are_computed_without_the_bad_rows(config, root, dataset_v3):
    """There is no meta/stats.json: statistics come from the data files, one of which is damaged."""
    restore_video(root, dataset_v3)
    (root / "meta/stats.json").unlink()
    (root / "data/chunk-000/file-001.parquet").write_bytes(b"")
    setup = make_setup(config)
    assert [bad.episode for bad in setup.skipped] == [5, 6]
    assert all(np.isfinite(values).all() for of in setup.stats.values() for values in of.values())


def test_all_episodes_bad(config, root):
    shutil.rmtree(root / "data")
    with pytest.raises(ValueError, match="all 7 episodes are bad, so there is nothing to read; the first: dataset"):
        make_setup(config)
