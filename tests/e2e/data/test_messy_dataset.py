"""Recordings with other feature names: the command that `vlatune inspect` prints trains on them."""

import json
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_runs import no_ray
from recording_writer import write_recording
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from vlatune import cli
from vlatune.batch import Columns
from vlatune.config.flags import config_from_dict, parse_flags
from vlatune.config.settings import DatasetConfig, RunConfig
from vlatune.data.reader import make_unit
from vlatune.data.transforms import apply_all
from vlatune.run_setup import Setup, load_metas, make_setup
from vlatune.train.driver.launch import train
from vlatune.train.driver.tiny_base import fit_datasets, with_base

RED, BLUE, NAMES = (200, 30, 30), (30, 30, 200), ("dx", "dy")
FEW = ("--steps=2", "--batch_size=4", "--log_freq=1", "--dataset.eval_split=0.3", "--max_restarts=0")


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("messy recordings")  # with a space
    odd = {"state": "state", "action": "actions", "cameras": ("image",), "task": "pick_up the\ncube "}
    messy = write_recording(folder / "a", NAMES, state_dim=3, colour=RED, episodes_per_file=1, **odd)
    front = {"cameras": ("observation.images.front",), "task": "Put it down"}
    other = write_recording(folder / "b", NAMES, state_dim=3, colour=BLUE, episodes_per_file=1, seed=1, **front)
    for root in (messy, other):
        end_at_the_last_frame(root / "meta/episodes/chunk-000/file-000.parquet")
    return messy, other


def end_at_the_last_frame(file: Path) -> None:
    """Make `to_timestamp` one frame short."""
    table = pq.read_table(file)
    for number, name in enumerate(table.column_names):
        if name.endswith("/to_timestamp"):
            table = table.set_column(number, name, pa.array(np.asarray(table.column(name)) - 0.1))
    pq.write_table(table, file)


def rows_of(folder: Path, column: str) -> np.ndarray:
    """Return all rows of a feature, read without vlatune."""
    files = sorted((folder / "data").glob("*/*.parquet"))
    return np.array([row for file in files for row in pq.read_table(file).column(column).to_pylist()], np.float32)


def inspected(capsys, *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(["inspect", *words])
    return code, capsys.readouterr().out


def command_in(text: str) -> list[str]:
    """Return the printed command, split like in a shell."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith("vlatune train")]
    words = shlex.split(line)
    assert words[:2] == ["vlatune", "train"]
    return words[1:]


@pytest.fixture(scope="module")
def finished(ray_local, roots, tmp_path_factory) -> Path:
    """Return the run of the command that `inspect` prints, made short by a few flags."""
    with redirect_stdout(StringIO()) as printed:
        names = '--rename_map={"observation.images.front": "observation.images.image"}'
        assert cli.main(["inspect", *map(str, roots), names]) == cli.FAILED  # the action has another name
    run_dir = tmp_path_factory.mktemp("runs") / "messy"
    with no_ray():
        assert cli.main([*command_in(printed.getvalue()), f"--output_dir={run_dir}", *FEW]) == 0
    return run_dir


def test_the_command_that_inspect_prints_trains(finished, roots):
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["optimizer_steps"] == 2
    assert np.isfinite(summary["final_loss"])
    config = json.loads((finished / "config.json").read_text())
    assert config["dataset"]["root"] == [str(root) for root in roots]
    assert config["rename_map"] == {
        "actions": "action",
        "state": "observation.state",
        "image": "observation.images.image",
        "observation.images.front": "observation.images.image",
    }


def test_a_resumed_run_keeps_its_base_model(finished, capsys):
    base = finished / "base"
    made = (base / "model.safetensors").stat()
    stored = config_from_dict(RunConfig, json.loads((finished / "config.json").read_text()), "config")
    assert stored.policy.path == str(base)
    assert not (finished / ".base.making").exists()
    steps = json.loads((base / "policy_preprocessor.json").read_text())["steps"]
    (tokenizer,) = [one["config"]["tokenizer_name"] for one in steps if one["registry_name"] == "tokenizer_processor"]
    assert tokenizer == str(base / "tokenizer")
    longer = replace(stored, policy=replace(stored.policy, path=None), steps=3, resume=True)
    with no_ray():
        train(longer)
    assert json.loads((finished / "summary.json").read_text())["optimizer_steps"] == 3
    assert (base / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns
    assert "making a small PI0.5" not in capsys.readouterr().out


@pytest.fixture
def setup(finished) -> Setup:
    stored = config_from_dict(RunConfig, json.loads((finished / "config.json").read_text()), "config")
    return make_setup(stored)


def first_frames(setup: Setup) -> Columns:
    """Return three frames of each root, as a read task returns them."""
    from vlatune.data.reader import read_units

    pairs = zip(setup.metas, setup.specs, strict=True)
    return read_units(setup.specs, [make_unit(meta, spec, 0, np.arange(3), np.arange(3)) for meta, spec in pairs])


def test_prompts_are_complete(setup):
    """Underscores and line breaks are removed before an instruction is tokenised, and the state is not truncated."""
    tokens = apply_all(setup.eval_transforms(0), first_frames(setup))["observation.language.tokens"]
    tokenizer = Tokenizer.from_file(setup.policy.tokenizer_file)
    prompts = [tokenizer.decode(row.tolist()) for row in tokens]
    assert all(prompt.startswith("Task: pick up the cube, State: ") for prompt in prompts[:3])
    assert all(prompt.endswith("\nAction: ") for prompt in prompts)


def test_each_root_has_its_own_images(setup):
    assert [camera.name for spec in setup.specs for camera in spec.cameras] == ["image", "observation.images.front"]
    rows = first_frames(setup)
    colours = rows["image"][:, :, 30:, 30:].mean(axis=(2, 3))
    np.testing.assert_allclose(colours[:3], np.tile(RED, (3, 1)), atol=12)
    np.testing.assert_allclose(colours[3:], np.tile(BLUE, (3, 1)), atol=12)
    assert rows["observation.state"].shape == (6, 3)
    assert rows["action"].shape == (6, setup.policy.horizon, 2)


def test_it_is_evaluated_and_exported_with_the_names_and_statistics_it_was_trained_with(
    finished, roots, tmp_path, capsys
):
    assert cli.main(["eval", str(finished), "--max_samples=4", "--batch_size=4"]) == 0
    assert cli.main(["export", str(finished), str(tmp_path / "policy")]) == 0
    assert '"state": "observation.state"' in capsys.readouterr().out
    steps = json.loads((tmp_path / "policy/policy_preprocessor.json").read_text())["steps"]
    by_name = {one["registry_name"]: one for one in steps}
    assert by_name["rename_observations_processor"]["config"]["rename_map"] == {
        "image": "observation.images.image",
        "state": "observation.state",
        "observation.images.front": "observation.images.image",
    }
    stats = load_file(tmp_path / "policy" / by_name["normalizer_processor"]["state_file"])
    for key, columns in {"observation.state": ("state", "observation.state"), "action": ("actions", "action")}.items():
        rows = np.concatenate([rows_of(root, column) for root, column in zip(roots, columns, strict=True)])
        for name, share in {"q01": 0.01, "q99": 0.99}.items():
            expected = np.quantile(rows.astype(np.float64), share, axis=0).astype(np.float32)
            assert np.array_equal(stats[f"{key}.{name}"], expected)


def test_inspect_accepts_the_rename_map(roots, capsys):
    names = '{"state": "observation.state", "actions": "action", "image": "observation.images.top"}'
    code, text = inspected(capsys, str(roots[0]), f"--rename_map={names}")
    assert code == 0
    assert "is named" not in text
    assert json.loads(command_in(text)[-1].partition("=")[2]) == json.loads(names)
    assert cli.main(["inspect", str(roots[0]), '--rename_map={"stat": "observation.state"}']) == cli.MISUSED
    assert "no dataset has a feature 'stat'; did you mean state" in capsys.readouterr().err


def test_each_root_has_its_own_rename_map(roots, tmp_path):
    """The roots use the same names for different features."""
    twin = write_recording(
        tmp_path / "twin", NAMES, state_dim=3, state="image", action="actions", cameras=("state",), colour=BLUE
    )
    flags = [f"--dataset.root={roots[0]}", f"--dataset.root={twin}", "--recipe=tiny"]
    maps = [
        {"state": "observation.state", "actions": "action", "image": "observation.images.top"},
        {"image": "observation.state", "actions": "action", "state": "observation.images.top"},
    ]
    config = parse_flags([*flags, *(f"--dataset.rename_map={json.dumps(names)}" for names in maps)], RunConfig)
    assert config.dataset.rename_map == tuple(maps)
    fit = fit_datasets(load_metas(config), seed=0, max_dims=32)
    assert (fit.cameras, fit.state_dim, fit.action_dim) == (("observation.images.top",), 3, 2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            [],
            r"no feature 'observation.state'; did you mean 'state'\?.*; name it with --rename_map='{\"state\": \"observation.state\", \"act",
        ),
        (['--rename_map={"stat": "x"}'], "--rename_map: dataset '.*' has no feature 'stat'; did you mean state"),
        (["--dataset.rename_map={}", "--dataset.rename_map={}"], "--dataset.rename_map: 2 maps for 1 datasets"),
        (['--rename_map={"state": "observation.state", "actions": "observation.state"}'], "cannot be called"),
    ],
)
def test_an_invalid_rename_map_is_rejected_before_anything_is_made(flags, words, roots, tmp_path, capsys):
    run_dir = tmp_path / "run"
    code = cli.main(["train", "--recipe=tiny", f"--dataset.root={roots[0]}", f"--output_dir={run_dir}", *flags])
    assert code == cli.MISUSED
    assert re.search(words, capsys.readouterr().err)
    assert not run_dir.exists()


def test_a_base_model_that_a_killed_start_left_is_used_only_if_it_fits(roots, tmp_path):
    run_dir, printed = tmp_path / "run", []
    config = RunConfig(recipe="tiny", dataset=DatasetConfig(root=(str(roots[1]),)), output_dir=str(run_dir))
    (run_dir / ".base.making").mkdir(parents=True)  # as a kill leaves it
    assert with_base(config, load_metas(config), say=printed.append).policy.path == str(run_dir / "base")
    assert sorted(path.name for path in run_dir.iterdir()) == [".lock", "base"]
    made = (run_dir / "base/model.safetensors").stat().st_ino
    with_base(config, load_metas(config), say=printed.append)
    assert (run_dir / "base/model.safetensors").stat().st_ino == made
    assert len(printed) == 1
    other = replace(config, rename_map={"observation.images.front": "observation.images.top"})
    with_base(other, load_metas(other), say=printed.append)
    assert "observation.images.top" in json.loads((run_dir / "base/config.json").read_text())["input_features"]
    (run_dir / "base/made_for.json").unlink()
    with pytest.raises(ValueError, match=r"use it with --policy.path="):
        with_base(config, load_metas(config), say=printed.append)


def test_roots_with_other_cameras_are_rejected_with_a_rename_map(roots, capsys, tmp_path):
    words = [f"--dataset.root={roots[1]}", f"--dataset.root={roots[0]}", f"--output_dir={tmp_path / 'run'}"]
    names = '--rename_map={"state": "observation.state", "actions": "action"}'
    assert cli.main(["train", "--recipe=tiny", *words, names]) == cli.MISUSED
    assert '--rename_map=\'{"image": "observation.images.front"}\'' in capsys.readouterr().err
