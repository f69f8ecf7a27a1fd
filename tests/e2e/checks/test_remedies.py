"""Every remedy of `vlatune doctor` that can be copied or followed removes the problem that it was printed for."""

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mistakes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recording_writer import TOP, write_recording
from recordings import RECORDINGS

from vlatune import cli

WRIST = "observation.images.wrist"
SKIP = "--dataset.on_bad_episode=skip"


def doctor(capsys, words: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    cli.main(["doctor", *words, "--json"])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def with_flags(words: list[str], flags: list[str]) -> list[str]:
    names = {flag.partition("=")[0] for flag in flags}
    return [*(word for word in words if word.partition("=")[0] not in names), *flags]


class Problem(NamedTuple):
    make: Callable[[Path], object]
    """Writes or damages the dataset in the folder."""
    check: str
    flags: str = ""
    """Regular expression of the flags of the remedy."""
    given: tuple[str, ...] = ()
    """Flags of the user."""
    follow: Callable[[Path], object] | None = None
    """Actions of a user who follows a remedy without flags."""
    text: str = ""
    """Regular expression of the remedy's instruction."""


def recording(folder: Path, **options: Any) -> Path:
    return write_recording(folder, **{"cameras": (TOP, WRIST), **options})


def edit_info(folder: Path, **values: Any) -> None:
    mistakes.edit(folder / "meta/info.json", lambda info: info.update(values))


def divide_by_255(folder: Path, times: float = 1 / 255) -> None:
    def change(stats: dict[str, Any]) -> None:
        for name in ("min", "max", "mean", "std"):
            stats[TOP][name] = (np.array(stats[TOP][name]) * times).tolist()

    mistakes.edit(folder / "meta/stats.json", change)


def first_video(folder: Path) -> Path:
    return min((folder / "videos" / TOP).rglob("*.mp4"))


def damaged(damage: Callable[[Path], object], **options: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        recording(folder, **options)
        damage(folder)

    return make


def change_frame_index(folder: Path) -> None:
    """Give two rows of the first episode the same frame."""
    file = min((folder / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    frames = table.column("frame_index").to_numpy().copy()
    frames[3] = frames[2]
    pq.write_table(table.set_column(table.column_names.index("frame_index"), "frame_index", pa.array(frames)), file)


def break_base(folder: Path) -> None:
    recording(folder)
    (folder.parent / "base").mkdir()
    (folder.parent / "base/config.json").write_text("{")


def occupy(folder: Path) -> None:
    recording(folder)
    (folder.parent / "run").mkdir()
    (folder.parent / "run/notes.txt").write_text("mine")


PROBLEMS = {
    "folder in use": Problem(occupy, "run", r"--output_dir=\S+/run-2"),
    "vectors of other names": Problem(
        lambda folder: recording(folder, state="state", action="actions"),
        "features",
        r'--rename_map=\{"actions": "action", "state": "observation.state"\}',
    ),
    "more dims than the policy takes": Problem(
        lambda folder: recording(folder, action_names=[f"joint_{number}" for number in range(34)]),
        "dims",
        r"--recipe=act-tiny --policy.type=act .*--policy.path=null .*",
    ),
    "damaged base model": Problem(break_base, "base", "--policy.path=null", ("--policy.path=base",)),
    "timestamps of a clock": Problem(RECORDINGS["wall_clock"], "timestamps", "--dataset.timestamps=frame_index"),
    "missing video": Problem(damaged(lambda folder: first_video(folder).unlink()), "files", SKIP),
    "damaged video": Problem(damaged(lambda folder: first_video(folder).write_bytes(b"no video")), "videos", SKIP),
    "not finite": Problem(damaged(lambda folder: mistakes.insert_nan(folder, folder)), "data", SKIP),
    "rows of one frame": Problem(damaged(change_frame_index), "episodes", SKIP),
    "quantiles of no width": Problem(
        damaged(lambda folder: mistakes.flatten_quantiles(folder, folder)), "statistics", "--dataset.stats=computed"
    ),
    "no compiler": Problem(recording, "cluster", "--policy.compile=false", ("--policy.compile=true",)),
    "wrong fps": Problem(
        damaged(lambda folder: edit_info(folder, fps=30)),
        "fps",
        follow=lambda folder: edit_info(folder, fps=10),
        text=r"set fps to 10 in meta/info.json.*",
    ),
    "wrong total": Problem(
        damaged(lambda folder: edit_info(folder, total_frames=7)),
        "meta",
        follow=lambda folder: edit_info(folder, total_frames=50),
        text=r"set total_frames to 50 .*",
    ),
    "folder of another name": Problem(
        damaged(lambda folder: (folder / "videos").rename(folder / "video")),
        "files",
        follow=lambda folder: (folder / "video").rename(folder / "videos"),
        text=r".*rename video/ to videos/.*",
    ),
    "image statistics in 0..255": Problem(
        damaged(lambda folder: divide_by_255(folder, 255.0)),
        "statistics",
        follow=divide_by_255,
        text=r".*255.*",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_remedy_removes_the_problem(name: str, tmp_path: Path, capsys, monkeypatch):
    problem, root = PROBLEMS[name], tmp_path / "data"
    problem.make(root)
    monkeypatch.chdir(tmp_path)
    if name == "no compiler":
        monkeypatch.setenv("PATH", os.defpath.replace("/bin", "/nothing"))
        monkeypatch.delenv("CXX", raising=False)
    words = ["--recipe=tiny", f"--dataset.root={root}", "--batch_size=2", "--steps=4"]
    words += [f"--output_dir={tmp_path / 'run'}", f"--html={tmp_path / 'doctor.html'}", *problem.given]

    def found_in(answer: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for one in answer["findings"] if one["check"] == problem.check and one["level"] in ("warn", "fail")]

    before = found_in(doctor(capsys, words))
    assert before, f"doctor does not report {name}"
    assert re.fullmatch(problem.flags, " ".join(before[0]["flags"])), before
    assert re.fullmatch(problem.text or ".*", before[0]["remedy"]), before
    if problem.follow:
        problem.follow(root)
    after = doctor(capsys, with_flags(words, before[0]["flags"]))
    assert before[0]["level"] not in [one["level"] for one in found_in(after)]  # skipped episodes are still a warning
    assert not [one for one in after["findings"] if one["level"] == "fail"], after


SIDE = "observation.images.side"


def wide(folder: Path) -> Path:
    return recording(folder, action_names=[f"joint_{number}" for number in range(34)])


def other_names(folder: Path) -> Path:
    return recording(folder, state="state", action="actions")


ERRORS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "names": (other_names, ()),
    "names beside a renamed camera": (other_names, (f'--rename_map={{"{TOP}": "observation.images.front"}}',)),
    "names for a base": (other_names, ("--policy.path=base",)),
    "dims": (wide, ()),
    "dims of one robot of two": (wide, ("--dataset.root=other",)),
    "dims for a base": (wide, ("--policy.path=base",)),
    "dims of one robot of two for a base": (wide, ("--dataset.root=other", "--policy.path=base")),
    "cameras of two datasets": (lambda folder: recording(folder, cameras=(SIDE,)), ("--dataset.root=other",)),
    "cameras for a base": (lambda folder: recording(folder, cameras=(SIDE,)), ("--policy.path=base",)),
    "missing video": (damaged(lambda folder: first_video(folder).unlink()), ()),
}
"""Mistakes that `vlatune train` rejects with the flags that correct the command."""


@pytest.mark.parametrize("name", ERRORS)
def test_the_flags_of_an_error_correct_the_command(name: str, tmp_path: Path, capsys, monkeypatch, small_base: Path):
    """The corrected command reaches the last check: of its batch, which is larger than the datasets."""
    make, given = ERRORS[name]
    make(tmp_path / "data")
    recording(tmp_path / "other")
    (tmp_path / "base").symlink_to(small_base)
    monkeypatch.chdir(tmp_path)
    words = ["--dataset.root=data", *given, "--batch_size=1000", "--output_dir=run"]
    if "--policy.path=base" not in given:
        words.append("--recipe=tiny")

    def error() -> str:
        assert cli.main(["train", *words]) == cli.MISUSED
        return capsys.readouterr().err.splitlines()[-1]

    found = error()
    assert "global batch" not in found
    flags = [
        word
        for word in shlex.split(found.rpartition("; ")[2].rpartition(", or ")[2])
        if word.startswith("--") and "=" in word
    ]
    assert flags, found
    words = with_flags(words, flags)
    assert "less than one global batch of 1000" in error()


def test_inspect_prints_a_command_for_robots_of_which_one_has_more_dims(tmp_path: Path, capsys, monkeypatch):
    """The policies that take as many dims do not mix robots, so the command selects dims of that robot."""
    wide(tmp_path / "data")
    recording(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["inspect", "data", "other"]) == cli.OK
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:2] == ["vlatune", "train"]
    assert cli.main([*command[1:], "--batch_size=1000", "--output_dir=run"]) == cli.MISUSED
    assert "less than one global batch of 1000" in capsys.readouterr().err
