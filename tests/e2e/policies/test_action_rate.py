"""`--dataset.action_fps` and the names of relative joints reach the export, `vlatune eval` of it, and the model card."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recording_writer import write_recording
from small_run import make_finished

from vlatune import cli
from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.export.model_card import CARD
from vlatune.export.policy_files import VLATUNE_FILE
from vlatune.registry import get_adapter
from vlatune.run_setup import make_setup
from vlatune.train.driver.tiny_base import fit_datasets

NAMES = ("gripper", "shoulder", "elbow")
EVERY = ("--max_samples=1000", "--rollouts=0", "--device=cpu", "--json")


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> list[Path]:
    """Two recordings of one robot at 20 fps, and one at 30."""
    folder = tmp_path_factory.mktemp("rates")
    return [
        write_recording(folder / f"robot_{number}", NAMES, fps=fps, seed=number)
        for number, fps in enumerate((20, 20, 30))
    ]


@pytest.fixture(scope="module")
def base(roots, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "pi0"
    fit = fit_datasets(tuple(load_meta(str(root)) for root in roots), seed=0, max_dims=32)
    get_adapter("pi0").make_base(folder, replace(fit, horizon=4), small=True, place=folder)
    return folder


def config_for(base: Path, run_dir: Path, roots: list[Path], *flags: str) -> RunConfig:
    given = [
        *(f"--dataset.root={root}" for root in roots),
        "--dataset.eval_split=0.25",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        f"--policy.path={base}",
        "--policy.type=pi0",
        "--policy.train=heads",
        "--optimizer.lr=1e-2",
        "--seed=3",
        "--steps=20",
        "--save_every_s=0",
        f"--output_dir={run_dir}",
    ]
    return parse_flags([*given, *flags], RunConfig)


def trained(*given: Any) -> Path:
    """Make a run of two steps without Ray."""
    return make_finished(config_for(*given))


@pytest.fixture
def figures(capsys, tmp_path):
    def figures(path: Path, *words: str) -> dict[str, Any]:
        capsys.readouterr()
        where = f"--output_dir={tmp_path / 'figures'}"
        assert cli.main(["eval", str(path), *words, *EVERY, where]) == cli.OK, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return figures


def exported(run_dir: Path, folder: Path, *words: str) -> Path:
    assert cli.main(["export", str(run_dir), str(folder), *words]) == cli.OK
    return folder


def on(root: Path, found: dict[str, Any]) -> list[str]:
    return [f"--dataset.root={root}", f"--dataset.episodes={json.dumps(found['episodes'])}"]


def test_a_run_and_its_export_are_evaluated_at_the_trained_rate(roots, base, figures, tmp_path, capsys):
    run_dir = trained(base, tmp_path / "run", roots[:1], "--dataset.action_fps=10")
    own = figures(run_dir)
    capsys.readouterr()
    folder = exported(run_dir, tmp_path / "policy")
    assert "run it with --fps=10" in capsys.readouterr().out
    for path in (run_dir, folder):
        other = figures(path, *on(roots[0], own))
        assert other["action_fps"] == own["action_fps"] == 10
        assert other["val_loss"] == own["val_loss"]
        assert other["per_horizon_error"] == own["per_horizon_error"]
    record = json.loads((folder / VLATUNE_FILE).read_text())
    del record["action_fps"]
    (folder / VLATUNE_FILE).write_text(json.dumps(record))
    assert figures(folder, *on(roots[0], own))["val_loss"] != own["val_loss"]  # with every frame


def test_a_rate_that_is_no_rate_is_rejected(roots, base, tmp_path, capsys):
    folder = exported(trained(base, tmp_path / "run", roots[:1], "--dataset.action_fps=10"), tmp_path / "policy")
    for content in (
        "10",
        '{"action_fps": "10"}',
        '{"action_fps": 0}',
        '{"action_fps": 1e-300}',
        '{"vectors": {"action": 1}}',
        "{",
    ):
        (folder / VLATUNE_FILE).write_text(content)
        capsys.readouterr()
        assert cli.main(["eval", str(folder), f"--dataset.root={roots[0]}", *EVERY]) == cli.MISUSED, content
        assert VLATUNE_FILE in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chosen", "flags", "rate"),
    [
        ([0], (), "20"),
        ([0], ("--dataset.action_fps=12.5",), "12.5"),
        ([0, 1], (), "20"),
        ([0, 2], (), "FPS"),
        ([0, 2], ("--dataset.action_fps=10",), "10"),
    ],
)
def test_the_card_names_the_rate_of_the_actions(roots, base, tmp_path, chosen, flags, rate):
    run_dir = trained(base, tmp_path / "run", [roots[one] for one in chosen], *flags)
    card = (exported(run_dir, tmp_path / "policy") / CARD).read_text()
    assert re.findall(r"--fps=(\S+)", card) == [rate]
    assert ("action_fps" in json.loads((tmp_path / "policy" / VLATUNE_FILE).read_text())) == bool(flags)


def test_a_mixtures_loss_is_that_of_its_datasets(roots, base, figures, tmp_path):
    """Noise belongs to the sample, whatever its dataset's place among the roots."""
    run_dir = trained(base, tmp_path / "run", roots[:2])
    joint, folder = figures(run_dir), exported(run_dir, tmp_path / "policy")
    setup = make_setup(config_for(base, run_dir, roots[:2]))
    counts, losses = [], []
    for number, root in enumerate(roots[:2]):
        mine = setup.held_out.dataset == number
        episodes = setup.held_out.position[mine].tolist()
        assert episodes
        one = figures(folder, f"--dataset.root={root}", f"--dataset.episodes={json.dumps(episodes)}")
        counts.append(one["num_samples"])
        losses.append(one["val_loss"])
    assert sum(counts) == joint["num_samples"]
    mean = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)
    assert joint["val_loss"] == pytest.approx(mean, rel=1e-6)


RELATIVE = ("--policy.use_relative_actions=true", "--policy.relative_exclude_joints=[gripper]")


def test_a_policy_keeps_its_own_relative_joints_on_a_dataset_of_other_names(roots, base, figures, tmp_path):
    run_dir = trained(base, tmp_path / "run", roots[:1], *RELATIVE)
    folder, own = exported(run_dir, tmp_path / "policy"), figures(run_dir)
    nameless = Path(shutil.copytree(roots[0], tmp_path / "nameless"))
    info = json.loads((nameless / "meta/info.json").read_text())
    info["features"]["action"]["names"] = None
    (nameless / "meta/info.json").write_text(json.dumps(info))
    for path in (run_dir, folder):
        other = figures(path, *on(nameless, own))
        assert (other["val_loss"], other["action_error"]) == (own["val_loss"], own["action_error"])


def test_equal_dims_with_other_relative_joints_are_several_robots(roots, base, tmp_path):
    other = write_recording(tmp_path / "other", NAMES[::-1])
    flags = [
        f"--dataset.root={roots[0]}",
        f"--dataset.root={other}",
        f"--policy.path={base}",
        "--policy.type=pi0",
    ]
    assert not make_setup(parse_flags(flags, RunConfig)).binding.parts
    binding = make_setup(parse_flags([*flags, *RELATIVE], RunConfig)).binding
    assert [part.is_relative for part in binding.parts] == [(False, True, True), (True, True, False)]
    with pytest.raises(ValueError, match=r"its is_relative is .*robots=several"):
        make_setup(parse_flags([*flags, *RELATIVE, "--dataset.robots=one"], RunConfig))
