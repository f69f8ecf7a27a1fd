"""Files that strangers made, met the user's way: each is refused with its message and exit code, and nothing else happens.

To add a case add a row (cases.py). After every row these hold: no payload ran, nothing of the user's was carried out of
its folder or changed there, and neither a traceback nor a terminal escape was printed. The process has ray.data imported,
as it is with `from vlatune import read_lerobot`: only then Arrow knows the types that unpickle.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import ray.data  # noqa: F401 see above
from bombs import a_group_without_end, a_sentence_of, at, column, one_byte, renamed_camera, table
from cases import CASES, DATA, INFO, NAN, OUT, TASKS, TRAIN, VIDEO
from place import CANARY, READ, Case, Place, linked_out, updated

from vlatune import cli
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.policies.processors import PROCESSORS
from vlatune.policies.registry import get_adapter, policy_types
from vlatune.train.driver.tiny_base import fit_datasets


@pytest.mark.timeout(60, func_only=True)  # not for what all share
@pytest.mark.parametrize("case", [case for case in CASES if case.command != READ], ids=lambda case: case.name)
def test_it_is_refused_and_nothing_else_happens(case: Case, place: Place, capsys, monkeypatch) -> None:
    monkeypatch.delenv("VLATUNE_TRACEBACK", raising=False)
    monkeypatch.setattr("vlatune.train.driver.launch.local_ray", not_refused)
    case.make(place)
    words, before = place.words(case.command), content_of(place.folder / "outside")
    code = cli.main(words)
    out, err = capsys.readouterr()
    said = out + err
    assert case.says in " ".join(said.split()), said
    assert code == case.code, said
    assert "Traceback" not in said
    assert "(traceback in" not in said
    assert all(one.isprintable() or one == "\n" for one in said), repr(said)
    assert not place.marker.exists()
    assert CANARY not in said
    assert content_of(place.folder / "outside") == before
    assert not (place.folder / "out").exists()


def not_refused(*_: object) -> None:
    raise AssertionError("Ray would have been started: the input was not refused")


def test_the_table_is_long_enough() -> None:
    """Inputs, each under one name, whatever commands it is shown to."""
    ways = re.compile(r", (?:train|inspect|resume|export|report|report of two|doctor|eval|bench|--json|read_lerobot)$")
    assert len({ways.sub("", case.name) for case in CASES}) >= 250
    assert {case.command.split()[0] for case in CASES} >= {
        "inspect",
        "train",
        "read_lerobot",
        "report",
        "export",
        "eval",
        "bench",
        "make-dataset",
        "demo",
        "doctor",
    }
    assert len({(case.name, case.command) for case in CASES}) == len(CASES)


def test_a_cap_is_a_setting(place: Place, capsys, monkeypatch) -> None:
    table(TASKS, lambda: a_sentence_of(30_000))(place)
    assert cli.main(["inspect", str(place.dataset)]) == 1
    assert "set VLATUNE_MAX_TEXT_CHARS=30000" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("VLATUNE_MAX_TEXT_CHARS", "30000")
    cli.main(["inspect", str(place.dataset)])
    assert "MAX_TEXT_CHARS" not in capsys.readouterr().out


def test_decoding_has_a_limit_of_time(place: Place, monkeypatch) -> None:
    import numpy as np

    from vlatune.dataset.video.decoder import VideoPlace, decode_into

    file, out = place.folder / "long.mp4", np.empty((1, 3, 32, 32), np.uint8)
    a_group_without_end(file, 1500)
    where = VideoPlace("x", 3, "top", "long.mp4")
    decode_into(str(file), [149.9], out, tolerance_s=1e-3, place=where)
    monkeypatch.setenv("VLATUNE_MAX_DECODE_S", "0")
    with pytest.raises(
        ValueError, match=r"episode 3, camera 'top', long.mp4: decoding took seconds: .*VLATUNE_MAX_DECODE_S="
    ):
        decode_into(str(file), [120.0], out, tolerance_s=1e-3, place=where)


def test_the_reader_names_the_frame_that_is_no_number(place: Place) -> None:
    from vlatune.dataset.reader import read_unit
    from vlatune.pipeline.read_plan import plan_read

    column(DATA, "action", at(30, 2, NAN))(place)
    plan = plan_read(str(place.dataset), resize=(32, 32), action_horizon=4, cameras=[])
    units = [unit for task in plan.tasks for unit in task.places]
    with pytest.raises(ValueError, match=r"episode 2, .*frame \d+: column 'action' has nan in dim 2"):
        [read_unit(plan.tasks[0].delivery.spec, unit) for unit in units]


def test_episodes_with_nan_are_skipped_when_asked_for(place: Place) -> None:
    from vlatune.config import RunConfig
    from vlatune.flags import parse_command
    from vlatune.run_setup import make_setup

    column(DATA, "action", at(30, 2, NAN))(place)
    words = place.words(f"{TRAIN} --dataset.on_bad_episode=skip")[1:]
    config, _ = parse_command(words, RunConfig, operands=())
    (bad,) = make_setup(config, preflight=True).skipped
    assert bad.episode == 2
    assert "column 'action' has nan in dim 2" in bad.reason


def test_checksums_are_written_and_verified(place: Place, capsys) -> None:
    assert cli.main(["inspect", str(place.dataset), "--write_checksums=true"]) == 0
    assert "meta/checksums.json: the checksums of" in capsys.readouterr().err
    sums = json.loads((place.dataset / "meta/checksums.json").read_text())["sha256"]
    assert {INFO, DATA, VIDEO, TASKS} <= sums.keys()
    assert cli.main(["inspect", str(place.dataset)]) == 0
    one_byte(place.dataset / DATA)
    assert cli.main(["inspect", str(place.dataset), "--write_checksums=true"]) == 2
    assert "has errors, so that no meta/checksums.json is written" in capsys.readouterr().err


SHELL = """x$(mkdir code-ran)`mkdir code-ran`';mkdir code-ran;'";mkdir code-ran;"&mkdir code-ran"""
RECORDER = """#!/bin/sh
printf '%s\\n' "$@" >> words
"""


@pytest.mark.parametrize("name", [SHELL, f"{SHELL}\nmkdir code-ran\n"], ids=["a line", "lines"])
def test_a_command_that_is_shown_runs_nothing_else(place: Place, name: str, capsys, monkeypatch) -> None:
    """Of `inspect` and `doctor`, for a camera that a stranger named; it is given to a shell as a person would paste it."""
    renamed_camera(place.dataset, f"observation.images.{name}")
    root = place.dataset.rename(place.folder / "data $(mkdir code-ran)")
    monkeypatch.chdir(place.folder)
    (place.folder / "vlatune").write_text(RECORDER)
    (place.folder / "vlatune").chmod(0o700)
    cli.main(["inspect", str(root), "--json"])
    shown = [json.loads(capsys.readouterr().out)["command"]]
    cli.main(
        ["doctor", f"--dataset.root={root}", f"--policy.path={place.base}", "--batch_size=4", "--html=d.html", "--json"]
    )
    found = json.loads(capsys.readouterr().out)
    shown += [found["command"], *(one["command"] for one in found["findings"])]
    shown += [f"vlatune train {one['flags']}" for one in found["findings"] if one["flags"]]
    env = {"PATH": f"{place.folder}:{os.environ['PATH']}"}
    for text in filter(None, shown):
        subprocess.run(["/bin/sh", "-c", text], env=env, capture_output=True, check=False)
        subprocess.run(["/bin/sh", "-c", "".join(c if c.isprintable() else "?" for c in text)], env=env, check=False)
    assert not (place.folder / "code-ran").exists()
    assert "--rename_map=" in (place.folder / "words").read_text(), "nothing was shown"


def content_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_links_inside_the_dataset_are_fine(place: Place, capsys) -> None:
    for file in (INFO, DATA, VIDEO):
        path = place.dataset / file
        kept = place.dataset / ".annex" / path.name
        kept.parent.mkdir(exist_ok=True)
        shutil.move(path, kept)
        path.symlink_to(kept)
    assert cli.main(["inspect", str(place.dataset)]) == 0
    assert "no problems found" in capsys.readouterr().out


@pytest.mark.parametrize("which", ["dataset", "base"])
def test_the_hubs_cache_is_read(place: Place, which: str, capsys) -> None:
    """Its snapshots are links to blobs beside them; links to anywhere else are links out."""
    cache = place.folder / "hub" / "x--owner--name"
    snapshot = Path(shutil.copytree(getattr(place, which), cache / "snapshots" / "1234567890abcdef"))
    (cache / "blobs").mkdir()
    files = [path for path in snapshot.rglob("*") if path.is_file()]
    for number, path in enumerate(files):
        shutil.move(path, cache / "blobs" / str(number))
        path.symlink_to(Path("../" * len(path.relative_to(cache).parts[:-1])) / "blobs" / str(number))
    words = place.words(TRAIN.replace("--batch_size=4", "--batch_size=4096"))  # refused for that at last
    honest, mine = f"={getattr(place, which)}", f"={snapshot}"
    assert cli.main([word.replace(honest, mine) for word in words]) == 2
    assert "less than one global batch" in capsys.readouterr().err
    (cache / "blobs" / "0").rename(cache / "other")
    files[0].unlink()
    files[0].symlink_to(cache / "other")
    assert cli.main([word.replace(honest, mine) for word in words]) == 2
    assert OUT in capsys.readouterr().err


def test_the_demo_empties_no_other_run(place: Place, capsys) -> None:
    before = content_of(place.run)
    assert cli.main(["demo", f"--output_dir={place.run}"]) == 2
    assert "its config.json is of another run" in capsys.readouterr().err
    assert content_of(place.run) == before


def test_pruning_takes_only_what_is_named_like_a_checkpoint(place: Place) -> None:
    from vlatune.checkpoint.local_store import LocalStore
    from vlatune.checkpoint.store import prune

    folder = place.run / "checkpoints"
    (folder / "2024").mkdir()
    (folder / "00000001").symlink_to(place.outside / "00000001")
    store = LocalStore(folder)
    assert store.steps() == [2]
    prune(store, keep_last=1)
    assert (folder / "2024").is_dir()
    assert (place.outside / "00000001" / "precious").read_text() == CANARY


def test_a_field_that_lerobots_config_has_not_is_not_passed_on(place: Place) -> None:
    from vlatune.checkpoint.policy_files import make_policy_files, read_policy_files
    from vlatune.policies.base import Binding
    from vlatune.policies.pi05.adapter import Pi05Adapter

    binding = Binding((("a", "a"),), (), 7, 7, ())
    updated("base", "config.json", hook="os.system")(place)
    made = make_policy_files(Pi05Adapter().read_spec(place.base), binding, {}, dtype=None)
    assert "hook" not in json.loads(made["config.json"])
    updated("run", "checkpoints/00000002/policy/config.json", hook="os.system")(place)
    assert "hook" not in json.loads(read_policy_files(place.checkpoint, Pi05Adapter.schema)["config.json"])


@pytest.mark.parametrize("kind", policy_types())
def test_every_policys_base_is_held_to_the_list_of_steps(kind: str, dataset_v3: Path, tmp_path: Path) -> None:
    """A folder that is fine, then the same with one step more in either file."""
    fit = fit_datasets((load_meta(str(dataset_v3)),), seed=0, max_dims=32)
    adapter, folder = get_adapter(kind), tmp_path / "base"
    adapter.make_base(folder, fit, small=True, place=folder)
    adapter.read_spec(folder)
    for name in PROCESSORS:
        honest = (folder / name).read_text()
        content = json.loads(honest)
        content["steps"].append({"class": "subprocess.Popen", "config": {"args": ["true"]}})
        (folder / name).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"names the class 'subprocess\.Popen'"):
            adapter.read_spec(folder)
        (folder / name).write_text(honest)


def test_an_export_carries_no_code_along(place: Place) -> None:
    from vlatune.checkpoint.export import _copy_tokenizer

    (place.base / "tokenizer/tokenizer_evil.py").write_text("import os")
    _copy_tokenizer(place.base / "tokenizer/tokenizer.json", place.folder / "copied")
    copied = {path.name for path in (place.folder / "copied").iterdir()}
    assert "tokenizer.json" in copied
    assert {Path(name).suffix for name in copied} == {".json"}


def test_a_traceback_is_not_written_through_a_link(place: Place, capsys, monkeypatch) -> None:
    """A library's error while a report is written."""
    linked_out("run", "logs/traceback.txt")(place)
    before = content_of(place.outside)
    monkeypatch.setattr("vlatune.report.html.make_page", lambda *_, **__: json.loads("{"))
    assert cli.main(["report", str(place.run)]) == 2
    assert "JSONDecodeError" in capsys.readouterr().err
    assert content_of(place.outside) == before
    assert not (place.run / "logs/traceback.txt").is_symlink()


def test_a_secret_of_the_environment_is_cut_out_of_what_is_printed_and_kept(place: Place, capsys, monkeypatch) -> None:
    """A library quotes it in an error, once in one with a file name and once in any other."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setattr("vlatune.report.html.make_page", lambda *_, **__: shutil.copy(f"/no/{CANARY}", "/no/where"))
    assert cli.main(["report", str(place.run)]) == 1
    assert "/no/***: No such file" in capsys.readouterr().err
    monkeypatch.setattr("vlatune.report.html.make_page", lambda *_, **__: shutil.get_archive_formats()[CANARY])
    assert cli.main(["report", str(place.run)]) == 1
    assert CANARY not in capsys.readouterr().err
    kept = (place.run / "logs/traceback.txt").read_text()
    assert CANARY not in kept
    assert "TypeError" in kept
