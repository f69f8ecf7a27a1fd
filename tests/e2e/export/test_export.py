"""An export is a LeRobot policy: LeRobot loads it, and it predicts the same actions."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import check_actions, lerobot_actions, load_lerobot, noise_for, our_actions
from lerobot.configs import PreTrainedConfig
from safetensors.torch import load_file, save_file
from small_run import SmallRun, make_finished, running, small_config

from vlatune import cli
from vlatune.batch import ACTION, STATE
from vlatune.checkpoint.local_store import MANIFEST, NO_SCORE, make_manifest
from vlatune.config.settings import ExportConfig, OptimizerConfig, PolicyConfig, RunConfig
from vlatune.export.export import export_run

RENAMED = {"observation.images.top": "observation.images.base_0_rgb"}


@pytest.fixture(scope="module")
def renaming_base(small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base with other camera names than the dataset, one of them without data."""
    folder = tmp_path_factory.mktemp("renaming") / "base"
    shutil.copytree(small_base, folder)
    config = json.loads((folder / "config.json").read_text())
    features = config["input_features"]
    config["input_features"] = {
        "observation.images.base_0_rgb": features["observation.images.top"],
        "observation.images.right_wrist_0_rgb": features["observation.images.wrist"],
        STATE: {"type": "STATE", "shape": [32]},  # as the published base has it
    }
    config["output_features"][ACTION]["shape"] = [32]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def make_config(dataset_v3: Path, small_base: Path, renaming_base: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def make(train: str = "heads", *, rename: bool = False, **optimizer: float) -> RunConfig:
        base = renaming_base if rename else small_base
        config = small_config(dataset_v3, base, tmp_path / "run", policy=PolicyConfig(path=str(base), train=train))
        return replace(
            config,
            optimizer=OptimizerConfig(lr=1e-2, **optimizer),  # pyright: ignore[reportArgumentType]
            rename_map=RENAMED if rename else {},
        )

    return make


def export(run_dir: Path, folder: Path, **options: Any) -> Path:
    export_run(run_dir, folder, ExportConfig(**options), warn=pytest.fail)
    return folder


def robots_actions(folder: Path, policy: Any, run: SmallRun, **overrides: Any) -> np.ndarray:
    setup = run.start.setup
    return lerobot_actions(folder, policy, run.rows, setup.binding, noise_for(setup.policy, run.rows), **overrides)


def test_lerobot_predicts_the_same_actions_with_renamed_cameras(make_config, tmp_path, monkeypatch):
    """All fine-tuning modes are in tests/parity/test_export_matrix.py."""
    config = make_config("lora", rename=True)
    with running(config) as run:
        base_actions = our_actions(run)
        for _ in range(2):
            run.step()
        run.save()
    monkeypatch.chdir("/")
    check_actions(run, tmp_path / "exported")
    assert np.abs(our_actions(run) - base_actions).max() > 1e-3  # training has changed them


def test_an_export_needs_neither_the_dataset_nor_its_first_folder(make_config, dataset_v3, tmp_path):
    config = make_config()
    data = tmp_path / "data"
    shutil.copytree(dataset_v3, data)
    config = replace(config, dataset=replace(config.dataset, root=(str(data),)))
    with running(config) as run:
        run.step()
        run.save()
    expected = our_actions(run)
    shutil.rmtree(data)
    export(config.run_dir, tmp_path / "exported")
    moved = (tmp_path / "exported").rename(tmp_path / "moved")
    tokenizer = {"tokenizer_name": str(moved / "tokenizer")}
    found = robots_actions(moved, load_lerobot(moved), run, tokenizer_processor=tokenizer)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_the_files_contain_names_dims_and_statistics_but_no_local_paths(make_config, tmp_path):
    """Except the path of the tokenizer, by which LeRobot finds it."""
    run_dir = make_finished(make_config(rename=True))
    folder = export(run_dir, tmp_path / "exported")
    for file in (*folder.glob("*.json"), folder / "README.md"):
        assert str(tmp_path.parent) not in file.read_text().replace(str(folder / "tokenizer"), ""), file.name
    config = json.loads((folder / "config.json").read_text())
    assert config["output_features"][ACTION]["shape"] == config["input_features"][STATE]["shape"] == [3]
    steps = {
        one["registry_name"]: one for one in json.loads((folder / "policy_preprocessor.json").read_text())["steps"]
    }
    assert steps["rename_observations_processor"]["config"]["rename_map"] == RENAMED
    stats = load_file(folder / steps["normalizer_processor"]["state_file"])
    assert sorted(stats) == ["action.q01", "action.q99", "observation.state.q01", "observation.state.q99"]
    assert {(path.stat().st_mode & 0o777) for path in folder.glob("*.safetensors")} == {folder.stat().st_mode & 0o666}


def test_an_export_can_be_trained_further(make_config, dataset_v3, tmp_path):
    first = make_finished(make_config())
    folder = export(first, tmp_path / "exported")
    again = make_finished(small_config(dataset_v3, folder, tmp_path / "again"))
    moved = export(again, tmp_path / "second").rename(tmp_path / "moved")
    make_finished(small_config(dataset_v3, moved, tmp_path / "third"))


def test_a_checkpoint_cannot_name_another_tokenizer(make_config, tmp_path):
    """The checkpoint was changed together with its manifest; the export has the base's tokenizer."""
    run = make_finished(make_config())
    checkpoint = max((run / "checkpoints").glob("0*"))
    step = int(checkpoint.name)
    file = checkpoint / "policy/policy_preprocessor.json"
    content = json.loads(file.read_text())
    for one in content["steps"]:
        if one["registry_name"] == "tokenizer_processor":
            one["config"]["tokenizer_name"] = "/another/tokenizer"
    file.write_text(json.dumps(content))
    (checkpoint / MANIFEST).write_bytes(make_manifest(checkpoint, step, NO_SCORE).to_bytes())
    folder = export(run, tmp_path / "exported")
    assert "/another/" not in (folder / "policy_preprocessor.json").read_text()
    assert str(folder / "tokenizer") in (folder / "policy_preprocessor.json").read_text()
    assert (folder / "tokenizer/tokenizer.json").is_file()


def test_a_base_of_another_lerobot_version_is_trained_and_exported(make_config, small_base, dataset_v3, tmp_path):
    """Keys with defaults are missing, and an unknown key is false."""
    base = tmp_path / "base"
    shutil.copytree(small_base, base)
    stored = json.loads((base / "config.json").read_text())
    kept = ("type", "input_features", "image_resolution", "chunk_size", "n_action_steps")
    brief = {key: stored[key] for key in kept} | {"use_telepathy": False}
    (base / "config.json").write_text(json.dumps(brief))
    config = small_config(dataset_v3, base, tmp_path / "run")
    with running(config) as run:
        run.step()
        run.save()
    check_actions(run, tmp_path / "exported")
    (base / "config.json").write_text(json.dumps(brief | {"use_telepathy": True}))
    with pytest.raises(ValueError, match="use_telepathy"):
        make_finished(small_config(dataset_v3, base, tmp_path / "other"))


def test_averaged_weights_are_exported_by_default(make_config, tmp_path):
    run_dir = make_finished(make_config(ema_decay=0.5))
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    name = "model.action_in_proj.weight"
    for weights, file in (("auto", "ema"), ("ema", "ema"), ("trained", "trainable")):
        folder = export(run_dir, tmp_path / weights, weights=weights)
        stored = load_file(checkpoint / f"{file}.safetensors")[f"policy.{name}"]
        assert torch.equal(load_file(folder / "model.safetensors")[name], stored)


def test_an_adapter_is_loaded_by_peft_onto_the_base(make_config, small_base, tmp_path):
    from peft import PeftModel

    config = make_config("lora")
    with running(config) as run:
        for _ in range(2):
            run.step()
        run.save()
    folder = export(config.run_dir, tmp_path / "adapter", adapter=True)
    assert not (folder / "model.safetensors").exists()
    assert PreTrainedConfig.from_pretrained(folder).use_peft
    adapter_config = json.loads((folder / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(small_base)
    policy: Any = PeftModel.from_pretrained(load_lerobot(small_base), str(folder))  # pyright: ignore[reportArgumentType]
    tokenizer = {"tokenizer_name": str(folder / "tokenizer")}
    found = robots_actions(folder, policy.base_model.model, run, tokenizer_processor=tokenizer)
    np.testing.assert_allclose(found, our_actions(run), rtol=0, atol=1e-5)


def test_mistakes_are_reported_and_nothing_is_written(make_config, small_base, tmp_path):
    run_dir = make_finished(make_config())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("do not touch")
    other = tmp_path / "other"
    shutil.copytree(small_base, other)
    weights = load_file(other / "model.safetensors")
    weights["model.action_in_proj.weight"] += 1  # of the same names and shapes
    save_file(weights, other / "model.safetensors")
    mistakes = [
        (tmp_path, "new", {}, "is not a run folder"),
        (run_dir, "full", {}, "exists and is not an empty folder"),
        (run_dir, "new", {"checkpoint": "7"}, "--checkpoint=7"),
        (run_dir, "new", {"weights": "ema"}, "averaged weights"),
        (run_dir, "new", {"base": str(other)}, "give the right one with --base"),
        (run_dir, "new", {"base": str(tmp_path / "nowhere")}, "there is no such folder"),
        (run_dir, "new", {"adapter": True}, "--adapter=true"),
    ]
    before = sorted(tmp_path.iterdir())
    for run, name, options, expected in mistakes:
        with pytest.raises(ValueError, match=expected):
            export(run, tmp_path / name, **options)
    assert sorted(tmp_path.iterdir()) == before
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(ValueError, match="no checkpoint"):
        export(run_dir, tmp_path / "new")


def test_the_command_prints_what_lerobot_needs(make_config, tmp_path, capsys):
    run_dir = make_finished(make_config(rename=True))
    assert cli.main(["export", str(run_dir), str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path / 'new'}: optimizer step 2, trained weights" in out
    assert f"--rename_map='{json.dumps(RENAMED)}'" in out
    assert f"{tmp_path}/new/README.md" in out
    assert cli.main(["export", str(run_dir), str(tmp_path / "new")]) == cli.MISUSED
    assert str(tmp_path / "new") in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["export", str(run_dir), str(tmp_path / "empty")]) == 0
