"""`vlatune eval` on another dataset, and of LeRobot policy folders."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors
from run_copies import copy_run

from vlatune import cli
from vlatune.batch import ACTION, STATE
from vlatune.config.settings import EvalConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.evaluate.held_out import read_held_out
from vlatune.evaluate.subject import open_subject
from vlatune.registry import PACKAGES

SMALL = ("--max_samples=5", "--batch_size=3", "--rollouts=1")


def exported(run_dir: Path, folder: Path) -> Path:
    assert cli.main(["export", str(run_dir), str(folder)]) == cli.OK
    return folder


def of_the_policy(figures: dict) -> dict:
    """Return the figures without the names of the evaluated weights."""
    return {key: value for key, value in figures.items() if key not in ("checkpoint", "weights", "root")}


FAST = ("pi05", "act")
POLICIES = [one if one in FAST else pytest.param(one, marks=pytest.mark.slow) for one in PACKAGES]


@pytest.mark.parametrize("name", POLICIES)
def test_a_checkpoint_and_its_export_have_the_same_figures(name, run_of, dataset_v3, figures, tmp_path):
    """Bit-equal on held-out episodes, and on the same episodes given as another dataset."""
    run_dir = run_of(name)
    own = figures(run_dir, *SMALL)
    other = (f"--dataset.root={dataset_v3}", f"--dataset.episodes={json.dumps(own['episodes'])}", *SMALL)
    again = figures(run_dir, *other, f"--output_dir={tmp_path / 'again'}")
    folder = exported(run_dir, tmp_path / "policy")
    theirs = figures(folder, *other)
    assert of_the_policy(again) == of_the_policy(own) == of_the_policy(theirs)
    assert (theirs["checkpoint"], theirs["weights"]) == (str(folder), "stored")
    assert own["rollouts"]["replan_every"] == 3
    assert (tmp_path / "policy-eval" / "eval.html").is_file()
    assert json.loads((tmp_path / "policy-eval" / "eval.json").read_text()) == theirs


def test_another_dataset_is_evaluated_without_changing_the_run(run_of, dataset_v3, figures, tmp_path, capsys):
    run_dir = copy_run(run_of("act"), tmp_path / "run")
    figures(run_dir, *SMALL)
    before = {name: (run_dir / name).read_bytes() for name in ("eval.json", "report.html")}
    other = tmp_path / "other"
    make_dataset(other, SyntheticSpec(episodes=3, frames=9, seed=7))
    found = figures(run_dir, f"--dataset.root={other}", *SMALL)
    assert (found["episodes"], found["root"]) == ([0, 1, 2], str(other))
    assert {name: (run_dir / name).read_bytes() for name in before} == before
    assert json.loads((tmp_path / "run-eval" / "eval.json").read_text()) == found
    assert cli.main(["eval", str(run_dir), f"--dataset.root={other}", *SMALL]) == cli.OK
    text = capsys.readouterr().out
    assert f"5 samples of 3 episodes of {other}" in text
    assert f"open-loop action error on episodes of {other}" in text
    assert f"report: {tmp_path / 'run-eval' / 'eval.html'}" in text
    assert "held-out" not in text + (tmp_path / "run-eval" / "eval.html").read_text()


def test_the_training_dataset_is_not_needed(run_of, dataset_v3, figures, tmp_path):
    """Statistics come from the checkpoint, not from the evaluated dataset."""
    run_dir = copy_run(run_of("act"), tmp_path / "run")
    config = json.loads((run_dir / "config.json").read_text())
    config["dataset"]["root"] = [str(tmp_path / "gone")]
    (run_dir / "config.json").write_text(json.dumps(config))
    other = Path(shutil.copytree(dataset_v3, tmp_path / "other"))
    stats = json.loads((other / "meta/stats.json").read_text())
    stats["observation.state"]["mean"] = [9.0 for _ in stats["observation.state"]["mean"]]
    (other / "meta/stats.json").write_text(json.dumps(stats))
    words = (f"--dataset.root={other}", *SMALL, "--trust_run=true")
    assert (
        figures(run_dir, *words)["action_error"]
        == figures(run_dir, f"--dataset.root={dataset_v3}", *words[1:])["action_error"]
    )


def renamed(dataset: Path, folder: Path, names: dict[str, str]) -> Path:
    """Copy a dataset with renamed features."""
    shutil.copytree(dataset, folder)
    for own, other in names.items():
        if (folder / "videos" / own).exists():
            (folder / "videos" / own).rename(folder / "videos" / other)
    for file in (folder / "meta").glob("*.json"):
        text = file.read_text()
        for own, other in names.items():
            text = text.replace(f'"{own}"', f'"{other}"')
        file.write_text(text)
    import pyarrow.parquet as pq

    for file in folder.glob("meta/episodes/*/*.parquet"):
        table = pq.read_table(file)
        columns = table.column_names
        for own, other in names.items():
            columns = [column.replace(f"/{own}/", f"/{other}/") for column in columns]
        pq.write_table(table.rename_columns(columns), file)
    return folder


def test_the_rename_map_of_the_user_has_priority_over_the_policys(run_of, dataset_v3, figures, rejected, tmp_path):
    top, wrist = load_meta(str(dataset_v3)).cameras
    other = renamed(dataset_v3, tmp_path / "other", {top: "observation.images.eye"})
    line = rejected(run_of("act"), f"--dataset.root={other}", *SMALL)
    assert f"it has no camera '{top}'" in line
    assert f'--rename_map=\'{{"observation.images.eye": "{top}"}}\'' in line
    names = json.dumps({"observation.images.eye": top})
    plain = figures(run_of("act"), f"--dataset.root={dataset_v3}", *SMALL, f"--output_dir={tmp_path / 'a'}")
    found = figures(
        run_of("act"), f"--dataset.root={other}", f"--rename_map={names}", *SMALL, f"--output_dir={tmp_path / 'b'}"
    )
    assert found["action_error"] == plain["action_error"]
    assert list(found["blank_camera_errors"]) == ["observation.images.eye", wrist]
    folder = exported(run_of("act"), tmp_path / "policy")
    processor = json.loads((folder / "policy_preprocessor.json").read_text())
    for step in processor["steps"]:
        if step["registry_name"] == "rename_observations_processor":
            step["config"]["rename_map"] = json.loads(names)
    (folder / "policy_preprocessor.json").write_text(json.dumps(processor))
    assert figures(folder, f"--dataset.root={other}", *SMALL)["action_error"] == plain["action_error"]


def test_other_dims_are_rejected_and_other_names_are_a_warning(run_of, dataset_v3, rejected, tmp_path, capsys):
    for key, dims in ((ACTION, 4), (STATE, 5)):
        other = Path(shutil.copytree(dataset_v3, tmp_path / key))
        info = json.loads((other / "meta/info.json").read_text())
        info["features"][key] |= {"shape": [dims], "names": [f"joint_{n}" for n in range(dims)]}
        (other / "meta/info.json").write_text(json.dumps(info))
        line = rejected(run_of("pi05"), f"--dataset.root={other}", *SMALL)
        assert f"'{key}' has {dims} dims, the policy was trained on" in line
    other = Path(shutil.copytree(dataset_v3, tmp_path / "named"))
    info = json.loads((other / "meta/info.json").read_text())
    info["features"][ACTION]["names"] = [f"joint_{n}" for n in range(info["features"][ACTION]["shape"][0])]
    (other / "meta/info.json").write_text(json.dumps(info))
    words = ["eval", str(run_of("act")), f"--dataset.root={other}", *SMALL, f"--output_dir={tmp_path / 'out'}"]
    assert cli.main(words) == cli.OK
    assert "joint_0, joint_1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--dataset.root="),
        (("--dataset.root={data}", "--checkpoint=2"), "--checkpoint"),
        (("--dataset.root={data}", "--weights=ema"), "--weights"),
        (("--dataset.root={data}", "--dataset.episodes=[99]"), "episode 99"),
        (("--dataset.root=no/such",), "no/such"),
        (("--dataset.episodes=[1]",), "--dataset.root"),
    ],
)
def test_invalid_arguments_are_rejected(words, named, run_of, dataset_v3, rejected, tmp_path):
    folder = exported(run_of("act"), tmp_path / "policy")
    assert named in rejected(folder, *(word.format(data=dataset_v3) for word in words))
    assert not (tmp_path / "policy-eval").exists()


def test_folders_without_a_trained_policy_are_rejected(run_of, dataset_v3, rejected, tmp_path):
    root = f"--dataset.root={dataset_v3}"
    folder = exported(run_of("act"), tmp_path / "checkpoint" / "pretrained_model")
    assert f"`vlatune eval {folder}`" in rejected(folder.parent, root)
    assert "'observation.state.mean'" in rejected(run_of("act").parent / "base", root)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"type": "vqbet"}))
    assert "'vqbet'" in rejected(folder, root)


def test_a_folder_that_names_code_is_rejected(run_of, dataset_v3, rejected, tmp_path):
    folder = exported(run_of("act"), tmp_path / "policy")
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        text = (folder / name).read_text()
        content = json.loads(text)
        content["steps"][0] = {"class": "os.system", "config": {}}
        (folder / name).write_text(json.dumps(content))
        assert name in rejected(folder, f"--dataset.root={dataset_v3}")
        (folder / name).write_text(text)


def test_the_error_of_a_lerobot_folder_equals_lerobots(dataset_v3, figures, tmp_path):
    """Policy and processors are saved and run by LeRobot."""
    meta = load_meta(str(dataset_v3))
    torch.manual_seed(5)
    config = ACTConfig(
        input_features={
            **{name: PolicyFeature(FeatureType.VISUAL, (3, 96, 96)) for name in meta.cameras},
            STATE: PolicyFeature(FeatureType.STATE, meta.features[STATE].shape),
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, meta.features[ACTION].shape)},
        pretrained_backbone_weights=None,
        chunk_size=4,
        n_action_steps=4,
        dim_model=16,
        n_heads=2,
        dim_feedforward=16,
        latent_dim=4,
        device="cpu",
    )
    policy, stats = ACTPolicy(config).eval(), json.loads((dataset_v3 / "meta/stats.json").read_text())
    tensors = {key: {name: torch.tensor(one) for name, one in of.items()} for key, of in stats.items()}
    before, after = make_pre_post_processors(config, dataset_stats=tensors)
    folder = tmp_path / "pretrained_model"
    for one in (policy, before, after):
        one.save_pretrained(folder)
    words = (f"--dataset.root={dataset_v3}", "--max_samples=8", "--rollouts=0")
    found = figures(folder, *words)
    setup = open_subject(folder, EvalConfig(dataset=replace(EvalConfig().dataset, root=str(dataset_v3)))).setup
    rows = read_held_out(setup, 8)
    seen = {name: torch.from_numpy(rows[name]) / 255.0 for name in meta.cameras}
    with torch.no_grad():
        chunk = after(policy.predict_action_chunk(before(seen | {STATE: torch.from_numpy(rows[STATE])}))).numpy()
    error = np.abs(chunk - rows[ACTION])[~rows["action_is_pad"]].mean()
    assert found["action_error"] == pytest.approx(error, rel=1e-5)
    assert "rollouts" not in found
