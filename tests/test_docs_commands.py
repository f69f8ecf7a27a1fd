"""Every command of the README and of docs/ is run, or says what it needs and is checked as far as it goes without.

The place has what the pages talk about, small: recordings below data/ (`/data/x` is mapped to it), base models under the hub's
names as folders, and runs, made when a page first asks for one. Training is cut to two steps, in this process and without Ray
(tests of their own start it); on several datasets at once, which cannot be fed that way, it goes as far as where its workers
would start. The rest runs as it is written.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from pages import PAGES, Command, all_commands, blocks, inline_commands
from repository_files import ROOT
from train.without_ray import no_ray

from vlatune import cli
from vlatune.config import RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.flags import leaf_types, parse_command, parse_flags
from vlatune.policies.base import Fit
from vlatune.policies.registry import all_overrides, get_adapter
from vlatune.train.driver import launch

pytestmark = pytest.mark.early
COMMANDS = all_commands()
ELSEWHERE = {"demo": "tests/test_demo_policies.py", "bench": "tests/bench"}
"""Commands that take minutes, and whose tests are there."""
SHORT = ("--steps=2", "--batch_size=2", "--grad_accum=1", "--num_workers=1", "--log_freq=1", "--eval_freq=0")
SMALL = {
    "act": (
        "--policy.dim_model=32",
        "--policy.n_heads=2",
        "--policy.dim_feedforward=32",
        "--policy.chunk_size=4",
        "--policy.n_action_steps=4",
    ),
    "diffusion": (
        "--policy.down_dims=[16,32]",
        "--policy.n_groups=4",
        "--policy.horizon=8",
        "--policy.n_action_steps=4",
    ),
}
"""Policies that begin from nothing, at a size for the tests."""
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
"""Name -> what state, action and cameras are called; any other is the world of `vlatune make-dataset`."""


class Place:
    """A folder in which the pages' commands work."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self.folder, self._dataset = folder, dataset

    def words(self, command: Command) -> list[str]:
        """With what it names made, and `/data/` mapped to here."""
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
            if "train_config.json" in word:
                self._make_train_config(Path(word.partition("=")[2]))
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
            _write_recording(folder, *RECORDINGS[name], width=6 if name == "two_arms" else 3)
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

    def _make_train_config(self, file: Path) -> None:
        from lerobot.configs.default import DatasetConfig
        from lerobot.configs.train import TrainPipelineConfig
        from lerobot.policies.pi05 import PI05Config

        self._record("fold")
        self._make_base("lerobot/pi05_base")
        policy = PI05Config(device="cpu", push_to_hub=False, train_expert_only=True)
        policy.pretrained_path = Path("lerobot/pi05_base")
        root = str(self.folder / "data/fold")
        made = TrainPipelineConfig(dataset=DatasetConfig(repo_id="me/fold", root=root), policy=policy, job_name="fold")
        made.optimizer, made.scheduler = policy.get_optimizer_preset(), policy.get_scheduler_preset()
        (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
        made._save_pretrained((self.folder / file).parent)

    def make_run(self, name: str) -> None:
        """By the README's own command, if it is not there."""
        if not (self.folder / name / "summary.json").exists():
            first = next(one for one in COMMANDS if one.words[:2] == ("vlatune", "train"))
            words = [word for word in self.words(first) if not word.startswith("--job_name")]
            assert run([*words, f"--output_dir={name}"]) == cli.OK


def _write_recording(folder: Path, state: str, action: str, cameras: Sequence[str], *, width: int) -> None:
    from vlatune.dataset.synthetic.writer import DatasetFormat, DatasetWriter
    from vlatune.dataset.synthetic.writer_meta import plan_places

    names = tuple(f"joint {number}" for number in range(width))
    form = DatasetFormat(
        version="v3.0",
        fps=10,
        vectors={state: names, action: names},
        video_keys=tuple(cameras),
        height=48,
        width=48,
        codec="h264",
    )
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    with DatasetWriter(folder, form) as writer:
        for place in plan_places((12, 11, 12, 10), per_data_file=2, per_video_file=2):
            vectors = {key: rng.normal(0, 1, (place.length, width)).astype(np.float32) for key in (state, action)}
            films = {key: iter(rng.integers(0, 255, (place.length, 48, 48, 3), dtype=np.uint8)) for key in cameras}
            writer.add_episode(place, "fold the towel", vectors, films)
        writer.finish()


class ReadyError(BaseException):
    """A run has come to where it starts its workers; no `except` of the command line takes it for an error."""


def start_no_workers(*_: object) -> None:
    raise ReadyError


def run(words: Sequence[str]) -> int:
    """A command of vlatune in this process; training short, and its folders made anew."""
    assert words[0] == "vlatune"
    kind, rest, only_start = words[1], list(words[1:]), False
    if kind in ("train", "doctor"):
        config = parse_flags([word for word in rest[1:] if not word.startswith("--json")], RunConfig)
        rest += [*SHORT, *SMALL.get(config.policy.type, ())]
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
    classes += [command.flags() for command in cli.BENCHMARKS.values()] if name == "bench" else []
    found = {flag for cls in classes for flag in leaf_types(cls)} | {"config_path", "help"}
    if name in ("train", "doctor"):
        found |= {"from_lerobot", *(f"policy.{one}" for one in all_overrides())}
    return frozenset(found)


def test_pages_have_commands() -> None:
    assert len(COMMANDS) > 30
    assert {command.words[1] for command in COMMANDS if command.words[0] == "vlatune"} >= set(cli.COMMANDS) - {"bench"}


def test_blocks_say_their_language() -> None:
    """Commands that no test would find stand in a block of another language, or of none, behind another first line."""
    odd = [
        block.place
        for page in PAGES
        for block in blocks(page)
        if block.language not in ("sh", "python")
        and re.search(r"^\s*(vlatune [a-z]|make [a-z]|lerobot-\w+ -)", block.text, re.MULTILINE)
    ]
    assert not odd


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.words[0] == "vlatune"], ids=str)
def test_its_flags_are_understood(command: Command) -> None:
    _, found, rest = cli._find_command(list(command.words[1:]))
    other = "--help" in rest or any("train_config.json" in word for word in rest)
    if not other and "the package" not in (command.needs or ""):
        parse_command(rest, found.flags(), operands=found.operands)


@pytest.mark.parametrize("command", inline_commands(), ids=str)
def test_flags_in_a_sentence_exist(command: Command) -> None:
    name = command.words[1]
    assert name in cli.COMMANDS, f"{command.place}: there is no `vlatune {name}`"
    given = {word[2:].partition("=")[0].rstrip(".,;:") for word in command.words if word.startswith("--")}
    assert not given - flags_of_command(name), f"{command.place}: `vlatune {name}` has no such flag"


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.words[0] != "vlatune"], ids=str)
def test_another_program_is_marked(command: Command) -> None:
    assert command.needs, f"{command}: no test runs it; say what it needs in a line before it, as `# needs a robot`"
    if command.words[0] == "make":
        assert re.search(rf"^{command.words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


RUN = [one for one in COMMANDS if one.words[0] == "vlatune" and not one.needs and one.words[1] not in ELSEWHERE]


@pytest.mark.parametrize("command", RUN, ids=str)
def test_it_runs(command: Command, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = place.words(command)
    code = run(words)
    said = capsys.readouterr()
    assert code == cli.OK, f"{command}: exit code {code}\n{said.out[-2000:]}\n{said.err[-2000:]}"


@pytest.mark.parametrize("path", ELSEWHERE.values())
def test_what_runs_elsewhere_does(path: str) -> None:
    assert (ROOT / path).exists()


def test_lerobots_own_program_understands_the_lines_for_a_robot(place: Place) -> None:
    """As far as its settings: no robot is asked for."""
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
