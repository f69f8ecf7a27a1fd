"""The stage before training: which pictures are looked at, that a number is a function of its picture alone, what is refused."""

import json
import random
import re
import shutil
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from without_ray import compute_here, no_ray

from vlatune import cli
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.dataset.storage import feature_files
from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset
from vlatune.pipeline.sizing import Node
from vlatune.policies.base import Fit, ModuleOptions
from vlatune.policies.smolvla.smolvla_small import make_smolvla
from vlatune.run_setup import Setup, load_metas, make_setup
from vlatune.train.driver import feature_stage, launch
from vlatune.train.driver.feature_stage import Stage, find_missing, keep_features, num_encoders, plan_parts

FINGERPRINTS = {"base.weights": "weights", "dataset.0.meta": "meta", "dataset.0.files": "files"}
NO_CLUSTER = SimpleNamespace(sizing=None)


@pytest.fixture(scope="module")
def base(dataset_v3, tmp_path_factory) -> Path:
    (meta,) = load_metas(RunConfig(dataset=DatasetConfig(root=(str(dataset_v3),))))
    dims = (meta.features[key].shape[0] for key in ("observation.state", "action"))
    fit = Fit(tuple(meta.cameras), *dims, 5, 32, tuple(meta.tasks), 0)
    return make_smolvla(tmp_path_factory.mktemp("base") / "smolvla", fit)


@pytest.fixture
def config(dataset_v3, base, tmp_path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.2, run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(base), type="smolvla", train="expert", dtype="float32", keep_features=True),
        output_dir=str(tmp_path / "run"),
        max_restarts=0,
    )


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """So that an episode has several, the last one shorter than the others and than a chunk."""
    for module in (feature_files, feature_stage):
        monkeypatch.setattr(module, "PART_FRAMES", 5)
    monkeypatch.setattr(feature_stage, "CHUNK", 2)


def keep(config: RunConfig, fingerprints: dict[str, str] = FINGERPRINTS) -> tuple[Setup, list[str]]:
    said: list[str] = []
    setup = make_setup(config)
    keep_features(config, setup, fingerprints, NO_CLUSTER, lambda: None, say=said.append)
    return setup, said


def kept_files(config: RunConfig) -> dict[str, bytes]:
    folder = config.run_dir / "features"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.raw")}


# What is computed


def test_every_picture_of_training_is_in_one_part(config, small_parts):
    setup = make_setup(config)
    parts = plan_parts(setup)
    by_camera = groupby(sorted(parts, key=_camera), key=_camera)
    seen = {camera: np.concatenate([part.unit.frames for part in of]).tolist() for camera, of in by_camera}
    lengths = zip(setup.training.position.tolist(), setup.training.length.tolist(), strict=True)
    assert seen == {(episode, camera): [*range(length)] for episode, length in lengths for camera in (0, 1)}
    held_out = setup.metas[0].episodes.index[setup.held_out.position]
    assert not {part.unit.episode_index for part in parts} & {*held_out.tolist()}


def _camera(part: feature_stage.Part) -> tuple[int, int]:
    return part.unit.episode_index, part.camera


@pytest.mark.usefixtures("small_parts")
def test_a_number_depends_on_its_picture_alone(config, monkeypatch):
    """Neither on what was computed before it, nor by whom, nor on what a stage that broke off has left."""
    monkeypatch.setattr(feature_stage, "compute", compute_here)
    keep(config)
    whole = kept_files(config)
    assert len(whole) == len(plan_parts(make_setup(config))) > 20
    chosen = random.Random(0).sample(sorted(whole), 9)
    for name in chosen:
        (config.run_dir / "features" / name).unlink()
    (config.run_dir / "features/0/0/.000001-00000.raw.123456.aside").write_bytes(
        b"half"
    )  # of a process that was killed

    def backwards(stage, missing, *_):
        for part in reversed(missing):
            compute_here(stage, [part])

    monkeypatch.setattr(feature_stage, "compute", backwards)
    _, said = keep(config)
    assert "are to be computed" in said[0]
    assert kept_files(config) == whole
    assert not list(config.run_dir.rglob("*.aside"))
    _, said = keep(config)
    assert said[-1].endswith("all are there")


@pytest.mark.usefixtures("small_parts")
def test_training_reads_what_was_kept_of_its_frames(config, monkeypatch):
    monkeypatch.setattr(feature_stage, "compute", compute_here)
    setup, _ = keep(config)
    (spec,), (meta,), frames = setup.data_plan.specs, setup.metas, np.array([1, 2, 4, 5, 9])
    position = int(setup.training.position[1])
    rows = read_unit(spec, make_unit(meta, spec, position, frames, frames))
    pictures = read_unit(setup.specs[0], make_unit(meta, setup.specs[0], position, frames, frames))
    encoder = setup.adapter.load_encoder(setup.policy, ModuleOptions.of(config.policy))
    import torch

    for camera in spec.cameras:
        expected = encoder(torch.from_numpy(pictures[camera.column]))
        assert setup.kept is not None
        assert rows[camera.column].dtype == setup.kept.column_dtype
        np.testing.assert_allclose(rows[camera.column], expected, rtol=1e-5, atol=1e-6)
    others = [key for key in rows if key not in {camera.column for camera in spec.cameras}]
    assert all(np.array_equal(rows[key], pictures[key]) for key in others)


def test_rows_take_the_room_of_features_and_cost_no_decoding(config):
    kept = make_setup(config)
    plain = make_setup(replace(config, policy=replace(config.policy, keep_features=False)))
    assert kept.kept is not None
    fewer = 2 * (3 * 32 * 32 - kept.kept.nbytes)
    assert plain.data_plan.row_bytes() - kept.data_plan.row_bytes() == fewer
    shapes = [launch.run_shape(replace(config, policy=one), setup) for one, setup in _both(config, plain, kept)]
    assert shapes[1].row_bytes == shapes[0].row_bytes - fewer
    assert kept.from_pictures().data_plan.row_bytes() == plain.data_plan.row_bytes()


def _both(config: RunConfig, plain: Setup, kept: Setup):
    return (replace(config.policy, keep_features=False), plain), (config.policy, kept)


@pytest.mark.parametrize(
    ("cpus", "gpus", "pictures", "expected"), [(8, 0, 10, 1), (8, 0, 10**9, 8), (8, 2, 10, 2), (8, 2, 10**9, 2)]
)
def test_encoders_are_as_many_as_there_are_gpus_or_cores_with_work(config, cpus, gpus, pictures, expected):
    stage = Stage(make_setup(config), ModuleOptions.of(config.policy))
    sizing = SimpleNamespace(nodes=(Node(cpus, 10**9, gpus),))
    assert num_encoders(stage, pictures, 2, sizing) == expected  # pyright: ignore[reportArgumentType]


# What is refused


def test_features_of_another_base_are_refused_until_they_are_removed(config, monkeypatch):
    monkeypatch.setattr(feature_stage, "compute", compute_here)
    keep(config)
    other = FINGERPRINTS | {"base.weights": "others"}
    with pytest.raises(
        ValueError, match=r"made of other things \(base_weights\); remove '(.*)', and the same command"
    ) as said:
        keep(config, other)
    shutil.rmtree(str(said.value).split("remove '")[1].split("'")[0])
    keep(config, other)


def test_a_file_of_another_size_is_refused_before_training(config, monkeypatch):
    monkeypatch.setattr(feature_stage, "compute", compute_here)
    keep(config)
    file = next((config.run_dir / "features/0/0").glob("*.raw"))
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=rf"{file.name}': [\d,]+ bytes, expected [\d,]+; remove '.*features'"):
        keep(config)


def test_a_disk_without_room_is_refused_before_anything_is_computed(config, monkeypatch):
    monkeypatch.setattr(feature_stage, "free_bytes", lambda root: 100)
    with pytest.raises(
        ValueError, match=r"--policy.keep_features=true: [\d.]+ kB of features do not fit .* 100 bytes free; leave"
    ):
        keep(config)
    assert kept_files(config) == {}


def test_a_tower_that_gives_no_numbers_is_refused_with_the_place(config, monkeypatch):
    import torch

    monkeypatch.setattr(feature_stage, "compute", compute_here)
    setup = make_setup(config)
    broken = torch.nn.Module()
    broken.forward = lambda images: torch.full((len(images), *setup.kept.shape), torch.nan)  # pyright: ignore
    monkeypatch.setattr(type(setup.adapter), "load_encoder", lambda *_: broken)
    with pytest.raises(
        ValueError, match=r"episode \d, frame 0, camera 'observation.images.\w+': the base's connector makes"
    ):
        keep(config)
    assert kept_files(config) == {}


def test_a_stage_that_breaks_off_is_begun_again_as_often_as_it_gets_further(config, monkeypatch):
    def one_file_each(stage, missing, *_):
        compute_here(stage, missing[:1])
        raise RuntimeError("Ray's raylet died")

    monkeypatch.setattr(feature_stage, "compute", one_file_each)
    renewed: list[int] = []
    cluster = SimpleNamespace(sizing=None, renew=lambda: renewed.append(1))
    setup, config = make_setup(config), replace(config, max_restarts=1)
    count = len(plan_parts(setup))
    keep_features(config, setup, FINGERPRINTS, cluster, lambda: None, say=lambda _: None)
    assert (len(kept_files(config)), len(renewed)) == (count, count)
    shutil.rmtree(config.run_dir / "features")

    def in_vain(*_):
        raise RuntimeError("Ray's raylet died")

    monkeypatch.setattr(feature_stage, "compute", in_vain)
    with pytest.raises(RuntimeError, match="raylet died"):
        keep_features(config, setup, FINGERPRINTS, cluster, lambda: None, say=lambda _: None)
    assert find_missing(Stage(setup, ModuleOptions.of(config.policy)), plan_parts(setup))


def flags_of(config: RunConfig, *more: str) -> list[str]:
    return [
        f"--dataset.root={config.dataset.root[0]}",
        "--dataset.eval_split=0.2",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        f"--policy.path={config.policy.path}",
        "--policy.type=smolvla",
        "--policy.train=expert",
        "--policy.dtype=float32",
        f"--output_dir={config.output_dir}",
        "--batch_size=4",
        "--steps=2",
        "--save_freq=1",
        *more,
    ]


KEEP = "--policy.keep_features=true"


@pytest.mark.parametrize(
    ("more", "said", "remedy"),
    [
        (["--policy.train=full"], "what looks at the pictures is trained", ["--policy.train=expert"]),
        (
            ["--dataset.image_transforms.enable=true"],
            "leave one of them out",
            ["--dataset.image_transforms.enable=false"],
        ),
    ],
)
def test_what_does_not_go_together_is_refused_and_the_remedy_works(config, capsys, more, said, remedy):
    with no_ray():
        assert cli.main(["train", *flags_of(config, KEEP, *more)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1
        assert remedy[0].partition("=")[0] in error
        assert not config.run_dir.exists()
        assert cli.main(["train", *flags_of(config, KEEP, *more, *remedy)]) == 0, capsys.readouterr().err


def test_robots_one_of_which_lacks_a_camera_are_refused(config, tmp_path, capsys):
    make_dataset(tmp_path / "other", SyntheticSpec(episodes=3, frames=8, cameras=1))
    with no_ray():
        assert cli.main(["train", *flags_of(config, KEEP, f"--dataset.root={tmp_path / 'other'}")]) == 2
    error = capsys.readouterr().err
    assert f"dataset '{tmp_path / 'other'}' has no camera 'observation.images.wrist', which another has" in error
    assert error.rstrip().endswith("leave the flag out")


def test_datasets_that_are_read_together_have_each_their_own(config, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_stage, "compute", compute_here)
    shutil.copytree(config.dataset.root[0], tmp_path / "other")
    roots = (*config.dataset.root, str(tmp_path / "other"))
    keep(replace(config, dataset=replace(config.dataset, root=roots, episodes=(0, 1, 2), eval_split=0.0)))
    kept = kept_files(config)
    assert {name.partition("/")[0] for name in kept} == {"0", "1"}
    first, second = ({k[1:]: v for k, v in kept.items() if k[0] == number} for number in "01")
    assert first == second


def spoil(config: RunConfig, how: str) -> None:
    folder = config.run_dir / "features"
    file = next((folder / "0/0").glob("*.raw"))
    if how == "a link out":
        (config.run_dir.parent / "elsewhere").write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(config.run_dir.parent / "elsewhere")
    elif how == "cut off":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "not finite":
        for one in (folder / "0/0").glob("*.raw"):
            one.write_bytes(b"\xff" * one.stat().st_size)
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"base_weights": "another"}))


ANEW = "remove '.*features', and the same command computes them anew"
CHANGED = {
    "a link out": r"'.*\.raw' is a link that leads out of '.*', and nothing is written through links; remove it",
    "cut off": rf"\.raw': [\d,]+ bytes, expected [\d,]+; {ANEW}",
    "not finite": rf"\.raw': rows \d+ to \d+ hold numbers that are not finite; {ANEW}",
    "another manifest": rf"made of other things \(base_weights\); {ANEW}",
}


def test_features_that_were_changed_end_in_one_line_until_they_are_removed(config, capsys, tmp_path):
    features, honest, more = config.run_dir / "features", tmp_path / "honest", ["--steps=4", "--resume=true"]
    with no_ray():
        assert cli.main(["train", *flags_of(config, KEEP)]) == 0, capsys.readouterr().err
        shutil.copytree(features, honest)
        for how, says in CHANGED.items():
            spoil(config, how)
            capsys.readouterr()
            assert cli.main(["train", *flags_of(config, KEEP, *more)]) == 2
            error = capsys.readouterr().err
            assert len(error.splitlines()) == 1
            assert re.search(says, error), error
            shutil.rmtree(features)
            shutil.copytree(honest, features)
        shutil.rmtree(features)
        assert cli.main(["train", *flags_of(config, KEEP, *more)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("policy", ["pi05", "pi0", "act", "diffusion"])
def test_other_policies_say_that_they_do_not_have_it(capsys, dataset_v3, policy):
    assert cli.main(["train", f"--dataset.root={dataset_v3}", f"--policy.type={policy}", "--policy.path=x", KEEP]) == 2
    assert f"(--policy.type={policy}) has no such setting; leave it out" in capsys.readouterr().err


def test_a_run_does_not_change_it_without_a_word(config, capsys):
    with no_ray():
        assert cli.main(["train", *flags_of(config, KEEP)]) == 0, capsys.readouterr().err
        assert cli.main(["train", *flags_of(config, "--steps=3", "--resume=true")]) == 2
        error = capsys.readouterr().err
        assert "--policy.keep_features was True, now False" in error
        more = ["--steps=3", "--resume=true", "--allow_changed=config"]
        assert cli.main(["train", *flags_of(config, *more)]) == 0, capsys.readouterr().err
