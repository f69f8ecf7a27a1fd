"""A run resumes with its settings; changes are rejected with their name and the flag, or reported."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from small_run import make_finished, running, small_config

from vlatune.checkpoint.store import list_checkpoints
from vlatune.config.fields import leaf_types
from vlatune.config.settings import OptimizerConfig, RunConfig
from vlatune.train import fingerprint
from vlatune.train.driver.resume_rules import MAY_CHANGE, ResumePoint, check_run, find_resume_point


@pytest.fixture
def config(dataset_v3: Path, small_base: Path, tmp_path: Path) -> RunConfig:
    """A run with one checkpoint, on copies that a test may change."""
    data, base = tmp_path / "data", tmp_path / "base"
    shutil.copytree(dataset_v3, data)
    shutil.copytree(small_base, base)
    config = small_config(data, base, tmp_path / "run")
    make_finished(config)
    return config


def start_of(config: RunConfig) -> tuple[ResumePoint, list[str]]:
    printed: list[str] = []
    return find_resume_point(config, say=printed.append), printed


def test_the_same_command_resumes_silently(config):
    start, printed = start_of(config)
    assert start.step == 2
    assert printed == []


def change_weights(config: RunConfig) -> None:
    assert config.policy.path
    file = Path(config.policy.path) / "model.safetensors"
    weights = load_file(file)
    weights["model.action_in_proj.weight"] += 1
    save_file(weights, file, metadata={"format": "pt"})


def change_tokenizer(config: RunConfig) -> None:
    """One word more, in the tokenizer that the base's own processor names."""
    steps = json.loads((Path(config.policy.path or "") / "policy_preprocessor.json").read_text())["steps"]
    (name,) = [one["config"]["tokenizer_name"] for one in steps if one["registry_name"] == "tokenizer_processor"]
    copy = Path(config.policy.path or "") / "tokenizer"
    text = (Path(config.policy.path or "") / "policy_preprocessor.json").read_text().replace(name, str(copy))
    (Path(config.policy.path or "") / "policy_preprocessor.json").write_text(text)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["truncation"] = None
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer | {"version": "1.0"}) + " ")


def change_stats(config: RunConfig) -> None:
    file = Path(config.dataset.root[0]) / "meta" / "stats.json"
    stats = json.loads(file.read_text())
    stats["action"]["q99"][0] += 1
    file.write_text(json.dumps(stats))


def change_video(config: RunConfig) -> None:
    file = min(Path(config.dataset.root[0]).glob("videos/*/*/*.mp4"))
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("change", "group", "text"),
    [
        (change_weights, "base", r"base\.weights was"),
        (change_tokenizer, "base", r"base\.tokenizer was"),
        (change_stats, "dataset", r"dataset\.0\.meta was"),
        (change_video, "dataset", r"dataset\.0\.files was"),
    ],
)
def test_what_it_was_made_of_must_be_the_same(config, change: Callable[[RunConfig], None], group, text):
    change(config)
    with pytest.raises(ValueError, match=f"00000002 .*: {text}.*--allow_changed={group}"):
        start_of(config)
    _, printed = start_of(replace(config, allow_changed=(group,)))
    assert len(printed) == 1
    assert printed[0].startswith("changed since the checkpoint: ")


def test_another_version_is_rejected_unless_it_changes_no_number(config, monkeypatch):
    real = fingerprint.version
    monkeypatch.setattr(fingerprint, "version", lambda name: "9.9" if name in ("torch", "ray") else real(name))
    with pytest.raises(ValueError, match=r"torch was 2[^;]*, now 9.9\..*--allow_changed=versions") as error:
        start_of(config)
    assert "ray was" not in str(error.value)
    _, printed = start_of(replace(config, allow_changed=("versions",)))
    assert any("ray was" in line for line in printed)


def test_several_changes_are_named_together_with_their_flags(config):
    change_weights(config)
    change_video(config)
    changed = replace(config, seed=7, optimizer=OptimizerConfig(lr=1.0))
    with pytest.raises(ValueError, match=r"--optimizer.lr was 2.5e-05, now 1.0; --seed was 1000, now 7") as error:
        start_of(changed)
    assert "--allow_changed=config --allow_changed=base --allow_changed=dataset" in str(error.value)
    start, printed = start_of(replace(changed, allow_changed=("base", "dataset", "config", "versions")))
    assert start.step == 2
    assert len(printed) == 5  # another seed holds other episodes out


def test_other_episodes_are_another_order(config):
    changed = replace(config, dataset=replace(config.dataset, eval_split=0.5))
    with pytest.raises(ValueError, match=r"--dataset.eval_split was 0.2, now 0.5; dataset.selection was"):
        start_of(changed)


def test_a_setting_that_differs_is_rejected_for_the_folder_too(config):
    changed = replace(config, seed=7)
    with pytest.raises(
        ValueError, match=r"holds a run with other settings: --seed was 1000, now 7.*--allow_changed=con"
    ):
        check_run(changed)
    check_run(replace(changed, allow_changed=("config",)))


def test_free_settings_may_change_and_are_reported(config, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(config.dataset.root[0], moved)
    dataset = replace(config.dataset, root=(str(moved),))
    free = replace(config, dataset=dataset, steps=50, log_freq=1, num_workers=2, batch_size=4, keep_best=1)
    check_run(free)
    start, printed = start_of(free)
    assert start.setup.order.lanes == 8
    text = "\n".join(printed)
    for name in (
        "--steps was 20, now 50",
        "--num_workers was 1, now 2",
        "--dataset.root was",
        "the order of samples stays",
    ):
        assert name in text


def test_the_table_of_what_is_free_names_real_settings():
    known = leaf_types(RunConfig)
    for name in MAY_CHANGE:
        assert name in known or any(one.startswith(f"{name}.") for one in known), name


def test_workers_must_divide_the_lanes_and_the_global_batch_stays(config):
    with pytest.raises(ValueError, match=r"the global batch, .*, was 8, now 16.*--allow_changed=config"):
        start_of(replace(config, batch_size=16))
    odd = replace(config, num_workers=3, batch_size=8, allow_changed=("config",))
    with pytest.raises(ValueError, match=r"--num_workers=3 .*a number that divides 8"):
        start_of(odd)


def test_a_checkpoint_beyond_the_end_is_rejected(config):
    with pytest.raises(ValueError, match=r"--steps=1: checkpoint .* is already at step 2"):
        start_of(replace(config, steps=1))


def test_a_run_killed_after_its_last_save_has_nothing_left_to_do(config):
    start, _ = start_of(replace(config, steps=2))
    assert start.step == 2


def test_a_damaged_latest_checkpoint_is_skipped(config):
    with running(config) as run:
        run.step()
        run.save()
    newest = list_checkpoints(config.run_dir)[-1]
    data = bytearray((newest / "trainable.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "trainable.safetensors").write_bytes(data)
    start, printed = start_of(config)
    assert start.step == 2
    assert len(printed) == 1
    assert "WARNING" in printed[0]


def test_a_run_whose_folder_is_lost_resumes_from_its_storage_path(config, tmp_path):
    kept = replace(config, output_dir=str(tmp_path / "lost"), storage_path=str(tmp_path / "shared"))
    make_finished(kept)
    shutil.rmtree(kept.run_dir)
    resumed = replace(kept, resume=True)
    check_run(resumed)
    start, _ = start_of(resumed)
    assert start.step == 2
    with pytest.raises(ValueError, match="--resume=true: there is no run in"):
        check_run(replace(resumed, storage_path=str(tmp_path / "empty")))
