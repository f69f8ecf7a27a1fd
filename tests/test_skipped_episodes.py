"""`--dataset.on_bad_episode=skip`: the same episodes for every worker, every restart and the evaluation."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.health.bad_episodes import BadEpisode
from vlatune.report.run_folder import SKIPPED_FILE
from vlatune.run_setup import Setup, make_setup, read_skipped, write_skipped

WRIST_2 = "videos/observation.images.wrist/chunk-000/file-002.mp4"


@pytest.fixture
def root(dataset_v3, tmp_path) -> Path:
    """Seven episodes, the last without a video of its own."""
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
    """What a run leaves in its folder when it begins."""
    config.run_dir.mkdir()
    (config.run_dir / "config.json").write_text("{}")
    write_skipped(config.run_dir, setup.skipped)


def mend(root: Path, dataset_v3: Path) -> None:
    shutil.copy(dataset_v3 / WRIST_2, root / WRIST_2)


def test_the_bad_episode_is_in_neither_part(config, root):
    setup = make_setup(config)
    assert [(bad.dataset_index, bad.dataset, bad.episode) for bad in setup.skipped] == [(0, str(root), 6)]
    assert f"camera 'observation.images.wrist', {WRIST_2}: the file is missing" in setup.skipped[0].reason
    assert sorted([*setup.training.position, *setup.held_out.position]) == [0, 1, 2, 3, 4, 5]
    assert setup.order.lengths == tuple(setup.training.length.tolist())
    assert setup.metas[0].left_out == {6}


def test_without_asking_the_run_does_not_begin(config):
    with pytest.raises(ValueError, match=f"{WRIST_2} is missing"):
        make_setup(replace(config, dataset=replace(config.dataset, on_bad_episode="fail")), preflight=True)


def test_a_run_that_goes_on_keeps_its_episodes_though_the_data_was_mended(config, root, dataset_v3):
    first = make_setup(config, preflight=True)
    begin(config, first)
    mend(root, dataset_v3)
    again = make_setup(config, preflight=True)
    assert again.skipped == first.skipped
    assert again.order == first.order
    for name in ("dataset", "position", "length"):
        assert np.array_equal(getattr(again.held_out, name), getattr(first.held_out, name))


def test_a_run_that_never_began_looks_anew(config, root, dataset_v3):
    assert len(make_setup(config, preflight=True).skipped) == 1
    mend(root, dataset_v3)
    assert make_setup(config, preflight=True).skipped == ()


def test_one_start_sets_up_once(config, monkeypatch):
    """Up to the cluster, which is not started here."""
    from vlatune import run_setup
    from vlatune.train.driver import launch

    calls: list[str] = []
    for module, name in ((run_setup, "find_bad_episodes"), (run_setup, "load_meta")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, partial(_counted, calls, name, real))

    def no_cluster(_config, _folder, _shape):
        raise RuntimeError("no cluster today")

    monkeypatch.setattr(launch, "local_ray", no_cluster)
    with pytest.raises(RuntimeError, match="no cluster today"):
        launch.train(config)
    assert sorted(calls) == ["find_bad_episodes", "load_meta"]
    assert len(read_skipped(config.run_dir)) == 1


def _counted(calls, name, real, *args, **options):
    calls.append(name)
    return real(*args, **options)


def test_the_list_is_written_once_and_read_back(tmp_path):
    bad = (BadEpisode(0, "a", 3, "no frames"), BadEpisode(1, "s3://b", 12, "no rows"))
    write_skipped(tmp_path, bad)
    write_skipped(tmp_path, ())
    assert read_skipped(tmp_path) == bad
    told = json.loads((tmp_path / SKIPPED_FILE).read_text())["skipped_episodes"]
    assert told[1] == {"dataset_index": 1, "dataset": "s3://b", "episode": 12, "reason": "no rows"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"skipped_episodes": [{"episode": 1}]}', '{"skipped_episodes": 3}'])
def test_a_list_that_cannot_be_read_stops_the_run(text, tmp_path):
    (tmp_path / SKIPPED_FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"{SKIPPED_FILE}' is not readable .*; restore it, or begin a new run"):
        read_skipped(tmp_path)


def test_statistics_are_computed_without_the_bad_rows(config, root, dataset_v3):
    """Without meta/stats.json they come from the data files, one of which is damaged."""
    mend(root, dataset_v3)
    (root / "meta/stats.json").unlink()
    (root / "data/chunk-000/file-001.parquet").write_bytes(b"")
    setup = make_setup(config)
    assert [bad.episode for bad in setup.skipped] == [5, 6]
    assert all(np.isfinite(values).all() for of in setup.stats.values() for values in of.values())


def test_all_episodes_bad(config, root):
    shutil.rmtree(root / "data")
    with pytest.raises(ValueError, match="all 7 episodes are bad, so there is nothing to read; the first: dataset"):
        make_setup(config)


def test_storage_options_reach_the_dataset_and_secrets_do_not(config):
    plain = replace(config, dataset=replace(config.dataset, storage_options='{"anon": true}'))
    assert make_setup(plain).metas[0].root.storage_options == {"anon": True}
    secret = replace(config, dataset=replace(config.dataset, storage_options='{"secret": "hunter2"}'))
    with pytest.raises(ValueError, match="'secret' looks like a secret") as caught:
        make_setup(secret)
    assert "hunter2" not in str(caught.value)
