"""docs/adding_a_policy.md, followed to the letter: its files, its line that registers them, and the commands on top of it."""

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

from vlatune import cli
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.pipeline.transforms import apply_all
from vlatune.policies import registry
from vlatune.report.run_folder import read_config
from vlatune.report.sinks import read_jsonl
from vlatune.run_setup import make_setup

PAGE = ROOT / "docs" / "adding_a_policy.md"
STEPS = 60


def page_files() -> dict[str, str]:
    """Name -> text of every file on the page."""
    return dict(re.findall(r"^```python (\S+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


def entry_points() -> str:
    """The page's lines for pyproject.toml, as an installer writes them down."""
    (line,) = re.findall(
        r'^\[project\.entry-points\."vlatune\.policies"\]\n(\w+) = "(\S+)"', PAGE.read_text(), re.MULTILINE
    )
    return f"[vlatune.policies]\n{line[0]} = {line[1]}\n"


@pytest.fixture(scope="module")
def installed(site: Path):
    """The package beside vlatune, for this process and for those that the cluster starts from now on."""
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


def test_the_page_keeps_its_promise_of_length() -> None:
    assert {Path(name).parts[0] for name in page_files()} == {"toy_policy"}
    assert sum(len(text.splitlines()) for text in page_files().values()) < 120


def test_help_and_recipes_come_from_the_registry(installed, capsys) -> None:
    assert cli.main(["train", "--help"]) == cli.OK
    out = capsys.readouterr().out
    assert re.search(r"^ +toy +Toy: full \(every weight\), head \(the last layer\)$", out, re.MULTILINE)
    assert "a toy that learns in seconds" in out


def test_it_trains_from_scratch(run_dir) -> None:
    losses = [line["loss"] for line in read_jsonl(run_dir / "metrics.jsonl")]
    assert len(losses) == STEPS
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


def test_it_is_evaluated_without_a_sentence(run_dir, capsys) -> None:
    assert cli.main(["eval", str(run_dir), "--max_samples=8"]) == cli.OK
    figures = json.loads((run_dir / "eval.json").read_text())
    assert figures["blank_images_error"] > 0
    assert "blank_sentence_error" not in figures
    out = capsys.readouterr().out
    assert "pictures blanked" in out
    assert "sentence blanked" not in out


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
            "--policy.flow_samples=4: Toy (--policy.type=toy) has no such setting; leave it out",
        ),
    ],
)
def test_what_it_does_not_have_is_refused(flag, why, installed, dataset_v3, capsys) -> None:
    assert cli.main(["train", "--recipe=toy", f"--dataset.root={dataset_v3}", flag]) == cli.MISUSED
    assert why in capsys.readouterr().err


def test_a_policy_may_ask_for_a_history_other_bars_and_statistics_of_pictures(installed, run_dir, monkeypatch) -> None:
    """What others than PI0.5 ask of the data: the reader and the set-up deliver it."""
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
    assert {camera.letterbox.pad for camera in setup.specs[0].cameras} == {"left_top"}
