"""The policy of docs/adding_a_policy.md: its files and entry point are installed, trained, evaluated and exported."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from repository_files import ROOT
from safetensors.numpy import load_file

from vlatune import cli, registry
from vlatune.data.reader import make_unit, read_unit
from vlatune.data.transforms import apply_all
from vlatune.run.run_folder import read_config
from vlatune.run.sinks import read_jsonl
from vlatune.run_setup import make_setup

PAGE = ROOT / "docs" / "adding_a_policy.md"
STEPS = 60


def page_files() -> dict[str, str]:
    """Return name -> text of every file on the page."""
    return dict(re.findall(r"^```python (\S+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


def entry_points() -> str:
    """Return the entry point of the page in the format of installed packages."""
    (line,) = re.findall(
        r'^\[project\.entry-points\."vlatune\.policies"\]\n(\w+) = "(\S+)"', PAGE.read_text(), re.MULTILINE
    )
    return f"[vlatune.policies]\n{line[0]} = {line[1]}\n"


@pytest.fixture(scope="module")
def installed(site: Path):
    """Install the package for this process and new processes of the cluster."""
    for name, text in page_files().items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    information = site / "toy_policy-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-policy\nVersion: 0.1\n")
    (information / "entry_points.txt").write_text(entry_points())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_policy"]:
        del sys.modules[name]
    for folder in site.iterdir():
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def run_dir(ray_local, installed, dataset_v3, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "toy"
    flags = [f"--dataset.root={dataset_v3}", f"--output_dir={folder}", "--dataset.eval_split=0.2", "--batch_size=4"]
    flags += [f"--steps={STEPS}", "--save_freq=30", "--log_freq=1"]
    assert cli.main(["train", "--recipe=toy", *flags]) == cli.OK
    return folder


def test_help_and_recipes_come_from_the_registry(installed, capsys) -> None:
    assert cli.main(["train", "--help"]) == cli.OK
    out = capsys.readouterr().out
    assert re.search(r"^ +toy +Toy: full \(every weight\), head \(the last layer\)$", out, re.MULTILINE)
    assert "a toy policy that trains in seconds" in out


def test_it_trains_from_scratch(run_dir) -> None:
    losses = [line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl")]
    assert len(losses) == STEPS
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


def test_it_is_evaluated_without_an_instruction(run_dir, capsys) -> None:
    assert cli.main(["eval", str(run_dir), "--max_samples=8"]) == cli.OK
    figures = json.loads((run_dir / "eval.json").read_text())
    assert figures["blank_images_error"] > 0
    assert "blank_instruction_error" not in figures
    out = capsys.readouterr().out
    assert "blank images" in out
    assert "blank instruction" not in out


def test_it_is_exported(run_dir, tmp_path) -> None:
    folder = tmp_path / "exported"
    assert cli.main(["export", str(run_dir), str(folder)]) == cli.OK
    trained, base = (load_file(one / "model.safetensors") for one in (folder, run_dir / "base"))
    assert trained.keys() == base.keys()
    assert all((trained[name] != base[name]).any() for name in base)
    steps = json.loads((folder / "policy_preprocessor.json").read_text())["steps"]
    state_file = next(step["state_file"] for step in steps if step["registry_name"] == "normalizer_processor")
    assert set(load_file(folder / state_file)) == {
        f"{key}.{one}" for key in ("action", "observation.state") for one in ("mean", "std")
    }
    spec = registry.get_adapter("toy").read_spec(folder)
    assert len(spec.cameras) == 2


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--policy.train=expert", "--policy.train=expert: must be one of full, head"),
        (
            "--policy.flow_samples=4",
            "--policy.flow_samples=4: Toy (--policy.type=toy) has no such setting; remove it",
        ),
    ],
)
def test_unsupported_settings_are_rejected(flag, why, installed, dataset_v3, capsys) -> None:
    assert cli.main(["train", "--recipe=toy", f"--dataset.root={dataset_v3}", flag]) == cli.MISUSED
    assert why in capsys.readouterr().err


def test_a_policy_may_use_observation_history_padding_and_image_statistics(installed, run_dir, monkeypatch) -> None:
    import toy_policy.adapter as toy

    class Asking(toy.ToyAdapter):
        def read_spec(self, folder):
            asked = {"observation_offsets": (-1, 0), "action_offsets": (-1, 0, 1), "pad": "left_top"}
            normalisation = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MEAN_STD"}
            return replace(super().read_spec(folder), **asked, normalisation=normalisation)

    monkeypatch.setattr(toy, "ToyAdapter", Asking)
    setup = make_setup(read_config(run_dir))
    cameras = [camera for _, camera in setup.binding.cameras]
    assert all(setup.stats[camera]["mean"].shape == (3, 1, 1) for camera in cameras)
    frames = np.arange(3)
    rows = read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))
    batch = apply_all(setup.training_transforms(), rows)
    assert batch[cameras[0]].shape == (3, 2, 3, 48, 48)
    assert batch["observation.state"].shape[:2] == (3, 2)
    assert batch["action"].shape[:2] == (3, 3)
    assert batch["action_is_pad"][:, 0].tolist() == [True, False, False]
    assert {camera.pad for camera in setup.specs[0].cameras} == {"left_top"}
