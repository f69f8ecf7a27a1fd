"""A run folder leads to no place that the user has not named: neither its settings, nor a checkpoint's, nor its summary."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from summaries import summary

from vlatune import cli
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.report import run_places
from vlatune.report.run_folder import read_run, write_settings
from vlatune.report.run_places import is_trusted, places_of, require_trusted, seal_places, sealed_places
from vlatune.report.summary import write_summary

STORE = "asked://attacker/x"
CONFIG = RunConfig(
    dataset=DatasetConfig(root=("/data/a", "s3://bucket/b"), storage_options='{"endpoint_url": "http://host"}'),
    policy=PolicyConfig(path="owner/base"),
    storage_path=STORE,
)
asked: list[str] = []
"""Addresses that were contacted."""


class AskedFileSystem(MemoryFileSystem):
    protocol = "asked"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("asked://")

    def ls(self, path: str, **_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        asked.append(path)
        raise FileNotFoundError(path)

    info = ls


@pytest.fixture(autouse=True)
def _own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fsspec.register_implementation("asked", AskedFileSystem, clobber=True)
    asked.clear()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A stranger's: it is as a run of ours is, but for the seal."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_settings(folder, CONFIG)
    return folder


def test_every_place_of_the_settings_is_known() -> None:
    """A new setting of a place must be added there: whatever looks like one is."""
    assert {place for _, place in places_of(CONFIG)} == {
        STORE,
        "owner/base",
        "/data/a",
        "s3://bucket/b",
        '{"endpoint_url": "http://host"}',
    }
    assert places_of(replace(CONFIG, dataset=DatasetConfig(repo_id="owner/data")))[-1] == (
        "--dataset.repo_id",
        "owner/data",
    )


def test_a_seal_is_this_users_and_of_these_places(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    assert not is_trusted(run_dir, STORE)
    seal_places(run_dir, CONFIG)
    assert sealed_places(run_dir) == {place for _, place in places_of(CONFIG)}
    seal_places(run_dir, replace(CONFIG, storage_path="/other"))  # the same run goes on elsewhere
    assert {STORE, "/other"} <= sealed_places(run_dir)
    moved = Path(shutil.copytree(run_dir, tmp_path / "moved"))
    assert is_trusted(moved, STORE)
    key = tmp_path / "state/vlatune/run_key"
    assert key.stat().st_mode & 0o777 == 0o600

    content = json.loads((run_dir / "places.json").read_text())
    for odd in (
        content | {"places": [*content["places"], "asked://attacker/y"]},
        content | {"seal": "0" * 64},
        content | {"seal": None},
        content | {"places": {"a": 1}},
        {"places": []},
        [],
    ):
        (run_dir / "places.json").write_text(json.dumps(odd))
        assert sealed_places(run_dir) == frozenset(), odd
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    assert sealed_places(moved) == frozenset()


def test_without_a_home_nothing_is_sealed_and_nothing_fails(run_dir: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such")
    seal_places(run_dir, CONFIG)
    assert not (run_dir / "places.json").exists()
    assert not is_trusted(run_dir, STORE)


def test_what_lies_in_the_run_is_followed_and_a_link_out_of_it_is_not(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "base").mkdir()
    (tmp_path / "outside").mkdir()
    (run_dir / "out").symlink_to(tmp_path / "outside")
    assert is_trusted(run_dir, str(run_dir / "base"))
    assert is_trusted(run_dir, "/where/it/was/trained/base"), "moved with the run"
    for odd in (run_dir / "out", run_dir / "../outside", tmp_path / "outside", "/etc/out", "file:///etc", "a\0b"):
        assert not is_trusted(run_dir, str(odd)), odd


def test_the_refusal_names_the_places_and_the_flag(run_dir: Path) -> None:
    with pytest.raises(ValueError, match=rf"--storage_path={STORE}, --policy.path=owner/base, .*--trust_run=true"):
        require_trusted(run_dir, places_of(CONFIG), trust_run=False)
    require_trusted(run_dir, places_of(CONFIG), trust_run=True)
    seal_places(run_dir, CONFIG)
    require_trusted(run_dir, places_of(CONFIG), trust_run=False)


@pytest.mark.parametrize("command", [("eval",), ("export", "out")])
def test_a_strangers_run_makes_no_command_ask_an_address(run_dir: Path, tmp_path: Path, capsys, command) -> None:
    name, *more = command
    words = [name, str(run_dir), *(str(tmp_path / one) for one in more)]
    assert cli.main(words) == 2
    assert f"--storage_path={STORE}" in capsys.readouterr().err
    assert asked == []
    cli.main([*words, "--trust_run=true"])
    assert asked, "else the test shows nothing"


@pytest.mark.parametrize("finished", [False, True])
def test_a_report_looks_nowhere_else(run_dir: Path, tmp_path: Path, finished: bool) -> None:
    elsewhere = tmp_path / "elsewhere/run/checkpoints"
    (elsewhere / "00000007").mkdir(parents=True)
    (elsewhere / "00000007/manifest.json").write_text("{}")
    if finished:
        write_summary(run_dir, summary(checkpoint_place=str(elsewhere), checkpoints=(5,)))
        write_settings(run_dir, replace(CONFIG, storage_path=str(tmp_path / "elsewhere")))
    found = read_run(run_dir, []).checkpoints
    assert asked == []
    assert found.steps == ((5,) if finished else None), "what the summary says, and no look"
    seal_places(run_dir, replace(CONFIG, storage_path=str(tmp_path / "elsewhere") if finished else STORE))
    found = read_run(run_dir, []).checkpoints
    assert (found.steps, bool(asked)) == (((7,), False) if finished else ((), True))


def test_the_key_is_made_once(tmp_path: Path) -> None:
    first = run_places._key(make=True)
    assert first == run_places._key(make=False) == run_places._key(make=True)
    assert [path.name for path in (tmp_path / "state/vlatune").iterdir()] == ["run_key"]
