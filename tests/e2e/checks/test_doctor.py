"""`vlatune doctor`: an intact run passes, and each common mistake is reported with a remedy that works as printed."""

import html
import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mistakes
import numpy as np
import pytest
from recording_writer import write_recording

from vlatune import cli
from vlatune.batch import TOKEN_MASK
from vlatune.checks import doctor
from vlatune.checks.case import Case
from vlatune.checks.run_checks import check_images
from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.order.sample_order import epoch_order, step_samples
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.findings import Finding
from vlatune.policies.pi05.tiny import make_tiny_pi05

SPEC = SyntheticSpec(episodes=12, frames=20, fps=10, height=64, width=64, cameras=2, episodes_per_file=4)


class Mistake(NamedTuple):
    make: Callable[[Path, Path], None]
    check: str
    level: str
    remedy: str
    """Regular expression of the flags; empty if files must be corrected."""
    flags: tuple[str, ...] = ()
    """Wrong flags of the user."""


MISTAKES = {
    "camera misnamed": Mistake(
        mistakes.misname_camera,
        "cameras",
        "fail",
        '--rename_map={"observation.images.wrst": "observation.images.wrist"}',
    ),
    "horizon missing": Mistake(mistakes.remove_horizon, "horizon", "fail", "--policy.chunk_size=8"),
    "wrong fps": Mistake(mistakes.change_fps, "fps", "fail", ""),
    "tensor missing": Mistake(mistakes.remove_tensor, "weights", "fail", "--policy.path=null"),
    "prompts truncated": Mistake(mistakes.shorten_prompts, "prompts", "fail", r"--policy.tokenizer_max_length=\d+"),
    "no space for checkpoints": Mistake(
        mistakes.nothing, "storage", "fail", r"--keep_checkpoints=\d+", ("--keep_checkpoints=1000000000",)
    ),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    """Two datasets of one robot, and a base for them."""
    folder = tmp_path_factory.mktemp("intact run")
    for seed, name in enumerate(("first", "second")):
        make_dataset(folder / name, replace(SPEC, seed=seed))
    metas = [load_meta(str(folder / name)) for name in ("first", "second")]
    tasks = sorted({task for meta in metas for task in meta.tasks})
    size = {"state_dim": 3, "action_dim": 3, "horizon": 8, "image_size": 48}
    make_tiny_pi05(folder / "base", cameras=metas[0].cameras, tasks=tasks, **size)
    return folder


@pytest.fixture
def folder(intact, tmp_path) -> Path:
    """Return a copy; the base contains the name of its folder."""
    return Path(shutil.copytree(intact, tmp_path / "a folder", symlinks=True))


def command(folder: Path, *more: str, roots: tuple[str, ...] = ("first",)) -> list[str]:
    words = ["--recipe=tiny", *(f"--dataset.root={folder / name}" for name in roots)]
    words += [f"--policy.path={folder / 'base'}", "--batch_size=4", "--steps=20", "--dataset.run_length=2"]
    return [*words, f"--output_dir={folder / 'run'}", *more]


def run_doctor(capsys, words: list[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = cli.main(["doctor", *words, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def problems(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["check"], one["level"]) for one in answer["findings"] if one["level"] in ("warn", "fail")]


def with_remedy(found: dict[str, Any], words: list[str]) -> list[str]:
    names = {flag.partition("=")[0] for flag in found["flags"]}
    return [*(word for word in words if word.partition("=")[0] not in names), *found["flags"]]


@pytest.mark.parametrize("roots", [("first",), ("first", "second")], ids=["one dataset", "two datasets"])
def test_an_intact_run_passes(roots, folder, capsys):
    code, answer = run_doctor(capsys, command(folder, roots=roots))
    assert (code, answer["status"], problems(answer)) == (cli.OK, "pass", [])
    assert {one["check"] for one in answer["findings"]} == {check.name for check in doctor.all_checks()}
    (duration,) = [one["figures"] for one in answer["findings"] if one["check"] == "duration"]
    assert 0 < duration["seconds"] == pytest.approx(20 * duration["step_s"])
    assert not (folder / "run").exists()
    assert Path(answer["page"]) == folder / "run-doctor" / "doctor.html"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_and_its_remedy_works(name, folder, capsys):
    mistake = MISTAKES[name]
    mistake.make(folder / "first", folder / "base")
    words = command(folder, *mistake.flags)
    code, answer = run_doctor(capsys, words)
    assert set(problems(answer)) == {(mistake.check, mistake.level)}
    assert code == (cli.FAILED if mistake.level == "fail" else cli.OK)
    found = next(one for one in answer["findings"] if one["level"] == mistake.level)
    assert re.fullmatch(mistake.remedy, " ".join(found["flags"])), found
    assert found["remedy"] or found["flags"]
    if mistake.check in ("horizon", "weights", "prompts"):  # the next test applies the other remedies
        code, answer = run_doctor(capsys, with_remedy(found, words))
        assert (code, problems(answer)) == (cli.OK, [])


def test_several_mistakes_are_reported_at_once_with_one_command(folder, capsys):
    for make in (mistakes.misname_camera, mistakes.flatten_quantiles, mistakes.insert_nan):
        make(folder / "first", folder / "base")
    code, answer = run_doctor(capsys, command(folder, "--keep_checkpoints=1000000000"))
    assert code == cli.FAILED
    assert dict(problems(answer)) == dict.fromkeys(("cameras", "data", "statistics", "storage"), "fail")
    words = shlex.split(answer["command"])
    assert words[:2] == ["vlatune", "train"]
    code, answer = run_doctor(capsys, words[2:])
    assert (code, problems(answer)) == (cli.OK, [])


def test_missing_videos_are_reported_once_and_can_be_skipped(folder, capsys):
    (folder / "first/videos/observation.images.top/chunk-000/file-001.mp4").unlink()
    code, answer = run_doctor(capsys, command(folder))
    assert (code, problems(answer)) == (cli.FAILED, [("files", "fail"), ("episodes", "warn")])  # a third is left out
    found = next(one for one in answer["findings"] if one["level"] == "fail")
    assert found["examples"] == ["videos/observation.images.top/chunk-000/file-001.mp4"]
    code, answer = run_doctor(capsys, with_remedy(found, command(folder)))
    assert (code, problems(answer)) == (cli.OK, [("episodes", "warn")])


def test_checks_that_need_a_failed_check_are_skipped(folder, capsys):
    (folder / "base/config.json").write_text("{")
    _, answer = run_doctor(capsys, command(folder))
    skipped = {one["check"]: one["text"] for one in answer["findings"] if one["level"] == "skipped"}
    assert "'base' failed" in skipped["first batch"]
    assert not {"files", "storage"} & skipped.keys()


@pytest.mark.parametrize(
    "second", [("shoulder", "gripper", "elbow"), ("left", "left_gripper", "right", "right_gripper")]
)
def test_datasets_of_several_robots_pass(tmp_path, capsys, second):
    """The second robot has other dims, or other joints that stay absolute."""
    roots = [
        write_recording(tmp_path / "first", ("gripper", "shoulder", "elbow")),
        write_recording(tmp_path / "second", second),
    ]
    words = ["--recipe=pi0-tiny", *(f"--dataset.root={root}" for root in roots), f"--output_dir={tmp_path / 'run'}"]
    relative = ("--policy.use_relative_actions=true", "--policy.chunk_size=4", "--policy.n_action_steps=4")
    code, answer = run_doctor(capsys, [*words, *relative, f"--html={tmp_path / 'doctor.html'}"])
    assert code == cli.OK
    assert not [one for one in answer["findings"] if one["level"] in ("fail", "skipped")]


def test_the_text_and_the_page_escape_untrusted_names(folder, capsys):
    hostile = "<script>alert('x')</script> \x1b[31mred"
    info = folder / "first/meta/info.json"
    mistakes.edit(info, lambda found: found["features"]["action"].update(names=[hostile, "b", "c"]))
    code = cli.main(["doctor", *command(folder, "--keep_checkpoints=1000000000")])
    out, err = capsys.readouterr()
    assert code == cli.FAILED, out + err
    assert re.search(r"^fail storage", out, re.MULTILINE)
    assert re.search(r"^ +--keep_checkpoints=\d+$", out, re.MULTILINE)
    assert "\x1b" not in out
    page = (folder / "run-doctor/doctor.html").read_text()
    assert page.count("<script") == 1  # the page's own
    assert html.escape("<script>alert('x')</script>") in page
    assert page.count("data:image/png;base64,") == 2 * 4  # two cameras, four samples
    assert re.search(r"Task: [a-z ]+, State: [\d ]+;", page)
    assert page.count("Actions as recorded") == page.count("Actions normalised") == 4


def test_an_error_in_a_check_does_not_end_the_others(tmp_path):
    def broken(case: Case):
        yield Finding("warn", "one", "before")
        raise KeyError("x")

    failed: dict[str, str] = {}
    found = doctor.run_check(doctor.Check("one", broken), Case(RunConfig(), tmp_path), failed)
    assert [one.level for one in found] == ["warn", "fail"]
    assert failed.keys() == {"one"}


@pytest.fixture
def batch_case(folder, tmp_path) -> Case:
    """Run the checks up to the first batch."""
    case, failed = Case(parse_flags(command(folder), RunConfig), tmp_path), {}
    for check in doctor.all_checks():
        doctor.run_check(check, case, failed)
        if check.name == "first batch":
            break
    assert failed == {}
    return case


def test_the_first_batch_has_the_samples_of_the_first_step(batch_case):
    order, rows = batch_case.setup.order, batch_case.batch.rows
    wanted = step_samples(order, epoch_order(order, 0))[0]
    starts = np.cumsum(order.lengths) - order.lengths
    episodes = np.searchsorted(starts, wanted, side="right") - 1
    np.testing.assert_array_equal(rows["frame_index"], wanted - starts[episodes])
    np.testing.assert_array_equal(rows["episode_index"], batch_case.setup.training.position[episodes])
    tokens = [prompt.tokens for prompt in batch_case.batch.prompts]
    assert tokens == batch_case.batch.inputs[TOKEN_MASK].sum(axis=1).tolist()


@pytest.mark.parametrize(("largest", "levels"), [(1.0, ["pass"]), (255.0, ["fail", "pass"])])
def test_image_statistics_in_255_fail_a_policy_that_uses_them(largest, levels, batch_case):
    (meta,) = batch_case.metas
    scaled = {name: {"max": np.full((3, 1, 1), largest)} for name in meta.cameras}
    batch_case.metas = (replace(meta, stats={**meta.stats, **scaled}),)
    batch_case.policy = replace(batch_case.policy, normalisation={"VISUAL": "MEAN_STD"})
    assert [one.level for one in check_images(batch_case)] == levels
