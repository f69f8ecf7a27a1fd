"""An export on the hub: pushed with a card, private, in one commit; fetched again it is the same, and LeRobot loads it by name.

huggingface_hub reads its settings when it is imported, so whatever talks to the hub is a process of its own, against one on
the loopback interface.
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
import yaml
from loopback_hub import REPOSITORY, Hub, running_hub
from small_run import make_finished, small_config

from vlatune import cli
from vlatune.checkpoint import export as export_module
from vlatune.checkpoint.export import export_run
from vlatune.config import ExportConfig, PolicyConfig, RunConfig
from vlatune.files import write_json
from vlatune.flags import parse_flags
from vlatune.report.run_folder import read_run

TOKEN = "hf_thisMustNeverBeSeenAnywhere"
HOSTILE = "a`|<script>alert(1)</script>\n```sh\nrm -rf ~"
EVALUATION = {
    "checkpoint": "00000002",
    "weights": "trained",
    "val_loss": 0.5,
    "action_error": 0.125,
    "mean_action_error": 0.25,
    "blank_images_error": 0.2,
    "blank_sentence_error": 0.3,
    "num_samples": 64,
    "episodes": [3, 5],
    "per_dim_error": {HOSTILE: 0.1, "gripper": 0.15},
    "per_horizon_error": [0.1, 0.12, 0.15],
}


@pytest.fixture(scope="module")
def run_dir(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a small PI0.5, with figures as a run and an evaluation leave them."""
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
    """A hub that has the export now, the folder that was exported to, and what the command said."""
    place = tmp_path_factory.mktemp("pushed")
    (place / "hub").mkdir()
    with running_hub(Hub(place / "hub", token=TOKEN, exists=False)) as hub:
        flags = [run_dir, "exported", f"--push_to_hub={REPOSITORY}"]
        done = vlatune("export", *flags, cwd=place, endpoint=hub.endpoint, HF_TOKEN=TOKEN)
        assert done.returncode == 0, done.stdout + done.stderr
        yield hub, place / "exported", done.stdout + done.stderr


def test_what_is_pushed_is_the_folder_and_nothing_else(pushed):
    hub, folder, said = pushed
    assert files_of(hub.folder) == files_of(folder)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "loss.png"} <= files_of(
        hub.folder
    ).keys()
    assert hub.private
    assert hub.commits == ["Optimizer step 2"], "one commit: whoever fetches has all of it or nothing"
    assert f"pushed to {hub.endpoint}/{REPOSITORY}" in said
    assert any(one.startswith("PUT /lfs/") for one in hub.asked), "weights go as objects of LFS"


def test_neither_the_token_nor_a_path_of_this_machine_is_in_it(pushed, run_dir, dataset_v3):
    hub, folder, _ = pushed
    here = [str(one).encode() for one in (folder.parent, run_dir.parent, dataset_v3.parent)]
    for name, data in files_of(hub.folder).items():
        assert TOKEN.encode() not in data, name
        assert not [one for one in here if one in data], name
    for file in folder.parent.rglob("*"):  # the hub's own cache included
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file


LOADED = """
import subprocess, sys
from types import SimpleNamespace
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi05 import PI05Policy
folder, python, shell, plain, name = sys.argv[1:]
policy = SimpleNamespace(config=PreTrainedConfig.from_pretrained(folder))
exec(python)
print("by its lines:", len(preprocessor.steps), len(postprocessor.steps))
del preprocessor, postprocessor
subprocess.run(shell, shell=True, cwd=folder, check=True)
exec(plain)
print("by the plain call:", len(preprocessor.steps), len(postprocessor.steps))
assert not [one for one in sys.modules if one.partition(".")[0] == "vlatune"], "LeRobot alone"

from pathlib import Path
from huggingface_hub import snapshot_download
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from vlatune.policies.pi05.size import building_at, read_size
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
    """What a process of its own says, in another folder, that loads an export which was moved, and then the pushed one by its name."""
    place = tmp_path_factory.mktemp("loaded")
    export_run(run_dir, place / "exported", ExportConfig(), warn=pytest.fail)
    moved = (place / "exported").rename(place / "moved")
    text = (moved / "README.md").read_text().partition("## After moving")[2]
    lines, shell = re.findall(r"```\w+\n(.*?)\n```", text, re.DOTALL)
    imported, _ = lines.splitlines()  # the policy's config is all that the two lines want of it
    plain = f"{imported}\npreprocessor, postprocessor = make_pre_post_processors(policy.config, folder)"
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    words = (moved, lines, shell, plain, REPOSITORY)
    done = python(LOADED, *words, cwd=elsewhere, endpoint=pushed[0].endpoint, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


def test_a_moved_export_is_loaded_from_anywhere_by_the_lines_that_come_with_it(loaded):
    """By LeRobot alone; and with LeRobot's plain call, once the shell's line was run."""
    before, after = map(int, loaded["by its lines"].split())
    assert before > 1
    assert after > 1
    assert loaded["by the plain call"] == loaded["by its lines"]


def test_lerobot_loads_it_by_its_name_from_any_folder(pushed, loaded):
    assert loaded["actions"].startswith("(1, 5, ")
    assert files_of(Path(loaded["folder"])) == files_of(pushed[1]), "fetched again, every byte is the same"


def test_the_card_tells_what_it_is(pushed, run_dir):
    card = (pushed[1] / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["library_name"] == "lerobot"
    assert fields["pipeline_tag"] == "robotics"
    assert "pi05" in fields["tags"]
    assert "datasets" not in fields, "a folder of this machine is none that the hub could link"
    for told in ("| this policy | 0.125 |", "| always the mean action | 0.25 |", "64 samples of 2 episodes"):
        assert told in text
    assert "| what was trained | `heads`: " in text
    assert f"lerobot-rollout --policy.path={REPOSITORY} --robot.type=" in text
    assert "--robot.cameras='{top: {type: opencv" in text
    assert "--dataset.root=/path/to/v3" in text
    assert "![Loss by optimizer step](loss.png)" in text
    assert "After moving this folder" not in text


def test_names_of_strangers_are_no_markup(pushed):
    card = (pushed[1] / "README.md").read_text()
    assert card.count("```") % 2 == 0
    assert "\nrm -rf" not in card
    line = next(line for line in card.splitlines() if "alert(1)" in line)
    assert line.count("`") == 2, "the name is code from its beginning to its end"
    assert line.count("|") == 3


def test_the_command_in_the_card_is_one(pushed):
    text = (pushed[1] / "README.md").read_text()
    command = text.split("## How it was made")[1].split("```sh\n")[1].split("\n```")[0]
    words = shlex.split(command)
    assert words[:2] == ["vlatune", "train"]
    config = parse_flags(words[2:], RunConfig)
    assert (config.policy.train, config.steps) == ("heads", 20)


def test_a_public_repository_is_not_taken_for_a_private_one(run_dir, tmp_path):
    (tmp_path / "hub").mkdir()
    with running_hub(Hub(tmp_path / "hub", token=TOKEN, private=False)) as hub:
        flags = [run_dir, "exported", f"--push_to_hub={REPOSITORY}"]
        done = vlatune("export", *flags, cwd=tmp_path, endpoint=hub.endpoint, HF_TOKEN=TOKEN)
        assert done.returncode == cli.MISUSED
        assert "everybody can read it; give --hub_private=false" in done.stderr
        assert not files_of(hub.folder)
        assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("name", "environment", "told"),
    [
        (REPOSITORY, {}, "no token is set; set HF_TOKEN"),
        (REPOSITORY, {"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, so nothing is sent"),
        ("mine", {"HF_TOKEN": TOKEN}, "whose? give owner/name, as me/mine"),
        ("a/b/c", {"HF_TOKEN": TOKEN}, "no name of a hub repository"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_anything_is_done(run_dir, tmp_path, name, environment, told):
    (tmp_path / "hub").mkdir()
    with running_hub(Hub(tmp_path / "hub", exists=False)) as hub:
        done = vlatune(
            "export", run_dir, "exported", f"--push_to_hub={name}", cwd=tmp_path, endpoint=hub.endpoint, **environment
        )
    assert done.returncode == cli.MISUSED
    assert told in done.stderr
    assert not hub.asked, "not one request"
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("status", "path", "told"),
    [(401, None, "does not know the token"), (403, "create", "may not write there"), (500, "create", "answered 500")],
)
def test_a_hub_that_refuses_is_told_in_a_line(run_dir, tmp_path, status, path, told):
    (tmp_path / "hub").mkdir()
    refusing = Hub(tmp_path / "hub", token=TOKEN, exists=False, refusal=(status, ""), refused_path=path)
    given = TOKEN if path else TOKEN[:-1]
    with running_hub(refusing) as hub:
        flags = [run_dir, "exported", f"--push_to_hub={REPOSITORY}"]
        done = vlatune("export", *flags, cwd=tmp_path, endpoint=hub.endpoint, HF_TOKEN=given)
    assert done.returncode == cli.FAILED
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("vlatune: ")]
    assert f"hub repository '{REPOSITORY}': cannot be pushed to" in line
    assert told in line
    assert not (tmp_path / "exported").exists()


class Recorded:
    """Stands in for the hub's door, to look at what would go through it."""

    def __init__(self) -> None:
        self.pushed: list[str] = []

    def __call__(self, repository: str, files: dict[str, Path], message: str) -> str:
        self.pushed += files
        return "https://hub/" + repository


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(export_module, "require_pushable", lambda repository: None)
    monkeypatch.setattr(export_module, "open_repository", lambda repository, *, private: None)
    monkeypatch.setattr(export_module, "push", recorded)
    return recorded


@pytest.mark.parametrize(
    "name", ["notes.txt", "tokenizer.py", "token", ".env", "tokenizer/evil.sh", "samples.safetensors"]
)
def test_a_file_that_is_none_of_the_exports_is_not_pushed(run_dir, tmp_path, door, monkeypatch, name):
    write_rest = export_module.write_rest

    def with_one_more(plan: Any, aside: Path, folder: Path) -> bool:
        (aside / name).parent.mkdir(exist_ok=True)
        (aside / name).write_text("mine")
        return write_rest(plan, aside, folder)

    monkeypatch.setattr(export_module, "write_rest", with_one_more)
    with pytest.raises(ValueError, match="is no file of an export, and nothing was pushed"):
        export_run(run_dir, tmp_path / "out", ExportConfig(push_to_hub=REPOSITORY), warn=pytest.fail)
    assert not door.pushed


def test_adapters_of_a_base_that_nobody_else_has_are_not_pushed(dataset_v3, small_base, tmp_path, door):
    policy = PolicyConfig(path=str(small_base), train="lora")
    run = make_finished(small_config(dataset_v3, small_base, tmp_path / "run", policy=policy))
    with pytest.raises(ValueError, match="which nobody else has; push all weights"):
        export_run(run, tmp_path / "out", ExportConfig(push_to_hub=REPOSITORY, adapter=True), warn=pytest.fail)
    assert not (tmp_path / "out").exists()


def test_figures_of_other_weights_are_not_in_the_card(run_dir, tmp_path, door):
    write_json(run_dir / "eval.json", EVALUATION | {"checkpoint": "00000001"})
    try:
        export_run(run_dir, tmp_path / "out", ExportConfig(), warn=pytest.fail)
    finally:
        write_json(run_dir / "eval.json", EVALUATION)
    card = (tmp_path / "out/README.md").read_text()
    assert "These weights were not evaluated" in card
    assert "0.125" not in card


def test_damaged_figures_do_not_keep_weights_from_a_robot(run_dir, tmp_path):
    kept, said = (run_dir / "eval.json").read_bytes(), []
    (run_dir / "eval.json").write_text("{")
    try:
        export_run(run_dir, tmp_path / "out", ExportConfig(), warn=said.append)
    finally:
        (run_dir / "eval.json").write_bytes(kept)
    assert len(said) == 1
    assert "the model card has no figures of the run" in said[0]
    assert (tmp_path / "out/model.safetensors").exists()
    assert read_run(run_dir, []).evaluation == EVALUATION
