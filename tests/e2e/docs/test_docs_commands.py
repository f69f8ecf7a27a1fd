"""Every command of the README and of docs/ is run; commands that need more (`# needs`) are parsed.

The commands find small recordings below data/ (`/data/x` is mapped to it), tiny base models under the hub's names as folders, and
runs, made when a page first names one. Training takes two steps in this process, without Ray. Training on several datasets is run
up to the start of its workers.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest
from local_runs import no_ray
from pages import PAGES, Command, all_commands, blocks, inline_commands
from recording_writer import write_recording
from repository_files import ROOT

from vlatune import cli
from vlatune.config.fields import leaf_types
from vlatune.config.flags import parse_command, parse_flags
from vlatune.config.settings import RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.policies.base import Fit
from vlatune.registry import get_adapter, option_types
from vlatune.train.driver import launch

COMMANDS = all_commands()
ELSEWHERE = {"demo"}
"""Commands with separate tests because they take minutes."""
SHORT = ("--steps=2", "--batch_size=2", "--grad_accum=1", "--num_workers=1", "--log_freq=1", "--eval_freq=0")
SMALL = {
    "act": {"dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "chunk_size": 4, "n_action_steps": 4},
    "diffusion": {"down_dims": [16, 32], "n_groups": 4, "horizon": 8, "n_action_steps": 4},
}
"""Options of small models for policies that start without a base model."""
PI05_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
BASES = {
    "lerobot/pi05_base": ("pi05", PI05_CAMERAS),
    "lerobot/pi0_base": ("pi0", (*PI05_CAMERAS, "top")),
    "lerobot/smolvla_base": ("smolvla", ("camera1", "camera2", "camera3")),
}
IMAGES = "observation.images."
RECORDINGS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "odd_names": ("state", "actions", ["image"]),
    "a": ("observation.state", "action", ["front"]),
    "b": ("observation.state", "action", ["image"]),
    "desk": ("observation.state", "action", ["cam0", "cam1"]),
    "wrist": ("observation.state", "action", ["cam0", "cam1"]),
    "fold": ("observation.state", "action", [f"{IMAGES}base_0_rgb"]),
    "arm": ("observation.state", "action", [f"{IMAGES}top"]),
    "two_arms": ("observation.state", "action", [f"{IMAGES}top", f"{IMAGES}wrist"]),
}
"""Name -> names of state, action and cameras; other datasets are made by `vlatune make-dataset`."""


class Place:
    """A folder in which the pages' commands work."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder, self._dataset = folder, dataset

    def words(self, command: Command) -> list[str]:
        """Make what the command names, and return its words with `/data/` mapped to the folder."""
        words = [
            word.replace("=/data/", f"={self.folder}/data/").replace(" /data/", f" {self.folder}/data/")
            for word in command.words
        ]
        words = [f"{self.folder}{word}" if word.startswith("/data/") else word for word in words]
        made = command.words[2:3] if command.words[1] == "make-dataset" else ()
        for word in command.words:
            for name in re.findall(r"/?\bdata/(\w+)", word):
                if word not in made:
                    self._record(name)
            for name in BASES:
                if name in word or (name == "lerobot/smolvla_base" and word == "--recipe=smolvla"):
                    self._make_base(name)
        if command.words[1] in ("eval", "export", "report"):
            for word in command.words[2:]:
                if word.startswith("runs/"):
                    self.make_run(word)
        return words

    def _record(self, name: str) -> None:
        folder = self.folder / "data" / name
        if folder.exists():
            return
        if name in RECORDINGS:
            state, action, cameras = RECORDINGS[name]
            names = [f"joint {number}" for number in range(6 if name == "two_arms" else 3)]
            write_recording(folder, names, state=state, action=action, cameras=cameras)
        else:
            shutil.copytree(self._dataset, folder)

    def _make_base(self, name: str) -> None:
        folder, (kind, cameras) = self.folder / name, BASES[name]
        if folder.exists():
            return
        meta = load_meta(str(self._dataset))
        fit = Fit(
            cameras=tuple(IMAGES + camera for camera in cameras),
            state_dim=3,
            action_dim=3,
            horizon=4,
            image_size=48,
            tasks=meta.tasks,
            seed=0,
            recorded_hw=((96, 96),) * len(cameras),
            fps=meta.fps,
        )
        folder.parent.mkdir(exist_ok=True)
        get_adapter(kind).make_base(folder, fit, small=True, place=folder)

    def make_run(self, name: str) -> None:
        """Make a run with the first command of the README, if it does not exist."""
        if not (self.folder / name / "summary.json").exists():
            first = next(one for one in COMMANDS if one.words[:2] == ("vlatune", "train"))
            words = [word for word in self.words(first) if not word.startswith("--job_name")]
            assert run([*words, f"--output_dir={name}"]) == cli.OK


class ReadyError(BaseException):
    """Ends a run where it would start its workers; the command line does not catch it."""


def start_no_workers(*_: object) -> None:
    raise ReadyError


def run(words: Sequence[str]) -> int:
    """Run a command in this process; training is short, and its folders are removed before."""
    assert words[0] == "vlatune"
    kind, rest, only_start = words[1], list(words[1:]), False
    if kind in ("train", "doctor"):
        config = parse_flags([word for word in rest[1:] if not word.startswith("--json")], RunConfig)
        rest += [*SHORT, *(f"--policy.{name}={value}" for name, value in SMALL.get(config.policy.type, {}).items())]
        only_start = kind == "train" and len(config.dataset.root) > 1
        shutil.rmtree(config.run_dir, ignore_errors=True)
    if kind == "eval":
        rest.append("--max_samples=4")
    if kind in ("export", "make-dataset"):
        shutil.rmtree(rest[1 if kind == "make-dataset" else 2], ignore_errors=True)
    if kind == "make-dataset":
        rest += ["--episodes=6", "--frames=12"]
    with no_ray(), pytest.MonkeyPatch.context() as patch:
        if only_start:
            patch.setattr(launch, "_train_until_done", start_no_workers)
        try:
            return cli.main(rest)
        except ReadyError:
            return cli.OK


@pytest.fixture(scope="module")
def place(dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield Place(folder, dataset_v3)


@cache
def flags_of_command(name: str) -> frozenset[str]:
    """Names of its flags, without dashes."""
    classes = [command.flags() for key, command in cli.COMMANDS.items() if key == name]
    found = {flag for cls in classes for flag in leaf_types(cls)} | {"config_path", "help"}
    if name in ("train", "doctor"):
        found |= {"from_lerobot", *(f"policy.{one}" for one in option_types())}
    return frozenset(found)


def test_pages_have_commands() -> None:
    assert len(COMMANDS) > 30
    assert {command.words[1] for command in COMMANDS if command.words[0] == "vlatune"} >= set(cli.COMMANDS)


def test_blocks_of_commands_have_a_language() -> None:
    """Otherwise no test would find their commands."""
    odd = [
        block.place
        for page in PAGES
        for block in blocks(page)
        if block.language not in ("sh", "python")
        and re.search(r"^\s*(vlatune [a-z]|make [a-z]|lerobot-\w+ -)", block.text, re.MULTILINE)
    ]
    assert not odd


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.words[0] == "vlatune"], ids=str)
def test_flags_of_a_command_can_be_parsed(command: Command) -> None:
    found, rest = cli.COMMANDS[command.words[1]], list(command.words[2:])
    other = "--help" in rest or any("train_config.json" in word for word in rest)
    if not other and "the package" not in (command.needs or ""):
        parse_command(rest, found.flags(), operands=found.operands)


@pytest.mark.parametrize("command", inline_commands(), ids=str)
def test_flags_within_text_exist(command: Command) -> None:
    name = command.words[1]
    assert name in cli.COMMANDS, f"{command.place}: there is no `vlatune {name}`"
    given = {word[2:].partition("=")[0].rstrip(".,;:") for word in command.words if word.startswith("--")}
    assert not given - flags_of_command(name), f"{command.place}: `vlatune {name}` has no such flag"


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.words[0] == "make"], ids=str)
def test_make_targets_exist(command: Command) -> None:
    assert re.search(rf"^{command.words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


RUN = [one for one in COMMANDS if one.words[0] == "vlatune" and not one.needs and one.words[1] not in ELSEWHERE]


@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_runs(command: Command, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = place.words(command)
    code = run(words)
    printed = capsys.readouterr()
    assert code == cli.OK, f"{command}: exit code {code}\n{printed.out[-2000:]}\n{printed.err[-2000:]}"


def test_lerobot_rollout_parses_the_commands_for_a_robot(place: Place) -> None:
    import draccus
    import lerobot.cameras.opencv  # noqa: F401  (registers the type that the pages name)
    from lerobot.robots.so_follower import SO101FollowerConfig
    from lerobot.rollout import RolloutConfig

    found = [one for one in COMMANDS if one.words[0] == "lerobot-rollout"]
    assert found
    place.make_run("runs/fold")
    for command in found:
        words = [word for word in command.words[1:] if not word.startswith("--policy.path")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", list(command.words))
            exported = next(word.partition("=")[2] for word in command.words if word.startswith("--policy.path="))
            assert run(["vlatune", "export", "runs/fold", exported]) == cli.OK
            config = draccus.parse(RolloutConfig, args=words)
        assert config.policy is not None
        assert config.policy.type == "pi05"
        assert type(config.robot) is SO101FollowerConfig
        assert config.robot.cameras
