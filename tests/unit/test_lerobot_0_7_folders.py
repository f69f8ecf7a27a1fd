"""Bases as LeRobot 0.7 saves them: a tokenizer step with artifacts and a relative folder, and new fields in config.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vlatune import cli
from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.export.policy_files import make_policy_files
from vlatune.policies.loading import decode_config
from vlatune.registry import get_adapter
from vlatune.run_setup import make_setup

NEW_FIELDS = {
    "rtc_training_max_delay": 0,
    "use_visual_memory": False,
    "use_proprioceptive_memory": False,
    "memory_frames": 6,
    "memory_stride": 30,
    "memory_temporal_attention_every": 4,
}


@pytest.fixture
def newer_base(small_base, tmp_path) -> Path:
    folder = Path(shutil.copytree(small_base, tmp_path / "base"))
    edit(folder / "config.json", lambda config: config.update(NEW_FIELDS))
    edit(folder / "policy_preprocessor.json", lambda found: name_artifacts(found, "tokenizer"))
    return folder


def edit(file: Path, change: Any) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def name_artifacts(processor: dict[str, Any], folder: str) -> None:
    for step in processor["steps"]:
        if step["registry_name"] == "tokenizer_processor":
            step["config"]["tokenizer_name"] = folder
            step["artifacts"] = {"tokenizer_name": folder}


def flags(base: Path, dataset: Path) -> list[str]:
    return [f"--policy.path={base}", f"--dataset.root={dataset}", "--batch_size=4"]


@pytest.mark.parametrize("place", ["tokenizer", "parts/tokenizer"])
def test_it_is_set_up_from_any_folder(newer_base, dataset_v3, place, monkeypatch):
    monkeypatch.chdir("/")
    (newer_base / place).parent.mkdir(exist_ok=True)
    (newer_base / "tokenizer").rename(newer_base / place)
    edit(newer_base / "policy_preprocessor.json", lambda found: name_artifacts(found, place))
    setup = make_setup(parse_flags(flags(newer_base, dataset_v3), RunConfig))
    assert setup.policy.tokenizer_file == str(newer_base / place / "tokenizer.json")
    files = make_policy_files(setup.policy, setup.binding, setup.stats, dtype=None)
    assert b"artifacts" not in files["policy_preprocessor.json"], "the folder of an export is another"
    assert not json.loads(files["config.json"]).keys() & NEW_FIELDS


def test_the_model_takes_its_config(newer_base):
    from lerobot.policies.pi05 import PI05Config

    assert decode_config(newer_base, PI05Config).chunk_size == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_visual_memory", True), ("rtc_training_max_delay", 4), ("memory_frames", 8), ("an_idea_of_0_8", 1.5)],
)
def test_a_field_at_another_value_is_rejected_by_name(newer_base, dataset_v3, name, value, capsys):
    edit(newer_base / "config.json", lambda config: config.update({name: value}))
    assert cli.main(["train", *flags(newer_base, dataset_v3), f"--output_dir={newer_base}-run"]) == cli.MISUSED
    reported = capsys.readouterr().err
    assert f"config.json: '{name}'={value!r} is not supported for pi05" in reported


def test_a_field_that_is_off_is_dropped(newer_base):
    edit(newer_base / "config.json", lambda config: config.update(an_idea_of_0_8=None, another=False))
    assert get_adapter("pi05").read_spec(newer_base).horizon == 5


@pytest.mark.parametrize("artifacts", [{"tokenizer_name": "../elsewhere"}, ["tokenizer"], {"code": "tokenizer"}])
def test_artifacts_that_are_no_setting_of_the_step_are_rejected(newer_base, artifacts):
    def change(processor: dict[str, Any]) -> None:
        for step in processor["steps"]:
            if step["registry_name"] == "tokenizer_processor":
                step["artifacts"] = artifacts

    edit(newer_base / "policy_preprocessor.json", change)
    with pytest.raises(ValueError, match=r"artifacts are .*, expected settings of the step's config"):
        get_adapter("pi05").read_spec(newer_base)
