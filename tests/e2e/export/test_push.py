"""An export is pushed to the hub with a model card in one commit, and LeRobot loads it by name.

huggingface_hub reads its settings on import, so commands run in subprocesses, against a hub on the loopback interface.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import REPOSITORY, Hub, running_hub
from small_run import make_finished, small_config

from vlatune import cli
from vlatune.config.flags import parse_flags
from vlatune.config.settings import ExportConfig, PolicyConfig, RunConfig
from vlatune.export.export import export_run
from vlatune.storage.files import write_json

TOKEN = "hf_thisMustNeverBeSeenAnywhere"
HOSTILE = "a`|<script>alert(1)</script>\n```sh\nrm -rf ~"
EVALUATION = {
    "checkpoint": "00000002",
    "weights": "trained",
    "val_loss": 0.5,
    "action_error": 0.125,
    "mean_action_error": 0.25,
    "blank_images_error": 0.2,
    "blank_instruction_error": 0.3,
    "num_samples": 64,
    "episodes": [3, 5],
    "per_dim_error": {HOSTILE: 0.1, "gripper": 0.15},
    "per_horizon_error": [0.1, 0.12, 0.15],
}


@pytest.fixture(scope="module")
def run_dir(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two steps of a tiny PI0.5 with an evaluation."""
    folder = make_finished(small_config(dataset_v3, small_base, tmp_path_factory.mktemp("runs") / "fold"))
    lines = [{"optimizer_step": step, "loss": 1 / step} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(folder / "eval.json", EVALUATION)
    return folder


def vlatune(*words: object, cwd: Path, endpoint: str = "http://127.0.0.1:9", **environment: str) -> Any:
    return _run([sys.executable, "-m", "vlatune.cli", *map(str, words)], cwd, endpoint, environment)


def python(code: str, *words: object, cwd: Path, endpoint: str, **environment: str) -> Any:
    return _run([sys.executable, "-c", code, *map(str, words)], cwd, endpoint, environment)


def _run(command: list[str], cwd: Path, endpoint: str, environment: dict[str, str]) -> Any:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cwd / "hf"), "HF_HUB_DISABLE_XET": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings, cwd=cwd)
    assert TOKEN not in done.stdout + done.stderr
    return done


def files_of(folder: Path) -> dict[str, bytes]:
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.fixture(scope="module")
def pushed(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hub, Path, str]]:
    """Return a hub with the export, the exported folder, and the output of the command."""
    place = tmp_path_factory.mktemp("pushed")
    (place / "hub").mkdir()
    with running_hub(Hub(place / "hub", token=TOKEN, exists=False)) as hub:
        flags = [run_dir, "exported", f"--push_to_hub={REPOSITORY}"]
        done = vlatune("export", *flags, cwd=place, endpoint=hub.endpoint, HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stdout + done.stderr
        yield hub, place / "exported", done.stdout + done.stderr


def test_exactly_the_folder_is_pushed_in_one_commit(pushed):
    hub, folder, printed = pushed
    assert files_of(hub.folder) == files_of(folder)
    names = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "vlatune.json"}
    assert names <= files_of(hub.folder).keys()
    assert hub.private
    assert hub.commits == ["Optimizer step 2"]
    assert f"pushed to {hub.endpoint}/{REPOSITORY}" in printed
    assert any(one.startswith("PUT /lfs/") for one in hub.asked)


def test_the_files_contain_neither_the_token_nor_local_paths(pushed, run_dir, dataset_v3):
    hub, folder, _ = pushed
    here = [str(one).encode() for one in (folder.parent, run_dir.parent, dataset_v3.parent)]
    for name, data in files_of(hub.folder).items():
        assert TOKEN.encode() not in data, name
        assert not [one for one in here if one in data], name
    for file in folder.parent.rglob("*"):  # the hub's own cache included
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file


LOADED = """
import subprocess, sys
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi05 import PI05Policy
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
folder, shell, name = sys.argv[1:]
subprocess.run(shell, shell=True, cwd=folder, check=True)
steps = [len(one.steps) for one in make_pre_post_processors(PreTrainedConfig.from_pretrained(folder), folder)]
print("moved:", *steps)
assert not [one for one in sys.modules if one.partition(".")[0] == "vlatune"], "LeRobot alone"

from pathlib import Path
from huggingface_hub import snapshot_download
from vlatune.policies.model_size import building_at
from vlatune.policies.pi05.size import read_size
import torch

config = PreTrainedConfig.from_pretrained(name)
before, after = make_pre_post_processors(config, name)
cameras = {key: torch.rand(1, *one.shape) for key, one in config.input_features.items() if one.type.name == "VISUAL"}
state = torch.zeros(1, config.input_features["observation.state"].shape[0])
batch = before(cameras | {"observation.state": state, "task": ["reach the red pad"]})
folder = Path(snapshot_download(name))
with building_at(read_size(folder)):
    policy = get_policy_class(config.type).from_pretrained(name)
print("actions:", tuple(after(policy.predict_action_chunk(batch)).shape))
print("folder:", folder)
"""


@pytest.fixture(scope="module")
def loaded(pushed: tuple[Hub, Path, str], run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Load a moved export and the pushed export in a subprocess in another folder; return its output."""
    place = tmp_path_factory.mktemp("loaded")
    export_run(run_dir, place / "exported", ExportConfig(), warn=pytest.fail)
    moved = (place / "exported").rename(place / "moved")
    text = (moved / "README.md").read_text().partition("## After moving")[2]
    (shell,) = re.findall(r"```\w+\n(.*?)\n```", text, re.DOTALL)
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    done = python(LOADED, moved, shell, REPOSITORY, cwd=elsewhere, endpoint=pushed[0].endpoint, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


def test_a_moved_export_is_loaded_after_the_command_in_its_card(loaded):
    """LeRobot loads it without vlatune."""
    before, after = map(int, loaded["moved"].split())
    assert before > 1 < after


def test_lerobot_loads_the_pushed_export_by_name(pushed, loaded):
    assert loaded["actions"].startswith("(1, 5, ")
    assert files_of(Path(loaded["folder"])) == files_of(pushed[1])


def test_untrusted_names_are_no_markup(pushed):
    card = (pushed[1] / "README.md").read_text()
    assert card.count("```") % 2 == 0
    assert "\nrm -rf" not in card
    line = next(line for line in card.splitlines() if "alert(1)" in line)
    assert line.count("`") == 2
    assert line.count("|") == 3


def test_the_command_in_the_card_can_be_parsed(pushed):
    text = (pushed[1] / "README.md").read_text()
    command = text.split("## How it was made")[1].split("```sh\n")[1].split("\n```")[0]
    words = shlex.split(command)
    assert words[:2] == ["vlatune", "train"]
    config = parse_flags(words[2:], RunConfig)
    assert (config.policy.train, config.steps) == ("heads", 20)


def test_a_public_repository_needs_a_flag(run_dir, tmp_path):
    (tmp_path / "hub").mkdir()
    with running_hub(Hub(tmp_path / "hub", token=TOKEN, private=False)) as hub:
        flags = [run_dir, "exported", f"--push_to_hub={REPOSITORY}"]
        done = vlatune("export", *flags, cwd=tmp_path, endpoint=hub.endpoint, HF_TOKEN=TOKEN)
        assert done.returncode == cli.MISUSED
        assert "--hub_private=false" in done.stderr
        assert not files_of(hub.folder)
        assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("name", "environment", "named"),
    [
        (REPOSITORY, {}, "HF_TOKEN"),
        (REPOSITORY, {"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        ("mine", {"HF_TOKEN": TOKEN}, "owner/name"),
        ("a/b/c", {"HF_TOKEN": TOKEN}, "a/b/c"),
    ],
)
def test_a_push_that_cannot_work_is_rejected_without_a_request(run_dir, tmp_path, name, environment, named):
    (tmp_path / "hub").mkdir()
    with running_hub(Hub(tmp_path / "hub", exists=False)) as hub:
        done = vlatune(
            "export", run_dir, "exported", f"--push_to_hub={name}", cwd=tmp_path, endpoint=hub.endpoint, **environment
        )
    assert done.returncode == cli.MISUSED
    assert named in done.stderr
    assert not hub.asked
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(("status", "path"), [(401, None), (403, "create"), (500, "create")])
def test_an_error_of_the_hub_is_one_line(run_dir, tmp_path, status, path):
    (tmp_path / "hub").mkdir()
    refusing = Hub(tmp_path / "hub", token=TOKEN, exists=False, refusal=(status, ""), refused_path=path)
    given = TOKEN if path else TOKEN[:-1]
    with running_hub(refusing) as hub:
        flags = [run_dir, "exported", f"--push_to_hub={REPOSITORY}"]
        done = vlatune("export", *flags, cwd=tmp_path, endpoint=hub.endpoint, HF_TOKEN=given)
    assert done.returncode == cli.FAILED
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("vlatune: ")]
    assert REPOSITORY in line
    assert not (tmp_path / "exported").exists()


def test_adapters_of_a_local_base_are_not_pushed(dataset_v3, small_base, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    policy = PolicyConfig(path=str(small_base), train="lora")
    run = make_finished(small_config(dataset_v3, small_base, tmp_path / "run", policy=policy))
    with pytest.raises(ValueError, match="--adapter=true with --push_to_hub"):
        export_run(run, tmp_path / "out", ExportConfig(push_to_hub=REPOSITORY, adapter=True), warn=pytest.fail)
    assert not (tmp_path / "out").exists()


def test_an_evaluation_of_other_weights_is_not_in_the_card(run_dir, tmp_path):
    write_json(run_dir / "eval.json", EVALUATION | {"checkpoint": "00000001"})
    try:
        export_run(run_dir, tmp_path / "out", ExportConfig(), warn=pytest.fail)
    finally:
        write_json(run_dir / "eval.json", EVALUATION)
    card = (tmp_path / "out/README.md").read_text()
    assert "These weights were not evaluated" in card
    assert "0.125" not in card
