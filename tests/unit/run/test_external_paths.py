"""Paths outside of a run folder are opened only if the user has named them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from summaries import summary

from vlatune import cli
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig, to_json
from vlatune.run.external_paths import external_paths, is_allowed, record_paths, recorded_paths, require_allowed
from vlatune.run.run_folder import CONFIG_FILE, read_run
from vlatune.run.summary import write_summary
from vlatune.storage.files import write_json

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
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fsspec.register_implementation("asked", AskedFileSystem, clobber=True)
    asked.clear()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run folder from elsewhere: its paths are not recorded."""
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / CONFIG_FILE, to_json(CONFIG))
    return folder


def test_all_external_paths_of_the_settings_are_known() -> None:
    assert {path for _, path in external_paths(CONFIG)} == {
        STORE,
        "owner/base",
        "/data/a",
        "s3://bucket/b",
        '{"endpoint_url": "http://host"}',
    }
    assert external_paths(replace(CONFIG, dataset=DatasetConfig(repo_id="owner/data")))[-1] == (
        "--dataset.repo_id",
        "owner/data",
    )


def test_a_record_belongs_to_a_user_and_a_folder(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    assert not is_allowed(run_dir, STORE)
    record_paths(run_dir, CONFIG)
    assert recorded_paths(run_dir) == {path for _, path in external_paths(CONFIG)}
    record_paths(run_dir, replace(CONFIG, storage_path="/other"))  # resumed with another storage
    assert {STORE, "/other"} <= recorded_paths(run_dir)
    (tmp_path / "link").symlink_to(run_dir)
    assert is_allowed(tmp_path / "link", STORE)
    copied = Path(shutil.copytree(run_dir, tmp_path / "copied"))
    assert recorded_paths(copied) == frozenset()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    assert recorded_paths(run_dir) == frozenset()


def test_recording_does_not_change_the_run_folder(run_dir: Path) -> None:
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    record_paths(run_dir, CONFIG)
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before


def test_a_missing_home_is_tolerated(run_dir: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such")
    record_paths(run_dir, CONFIG)
    assert not is_allowed(run_dir, STORE)


def test_paths_inside_the_run_are_allowed_but_not_links_out_of_it(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "base").mkdir()
    (tmp_path / "outside").mkdir()
    (run_dir / "out").symlink_to(tmp_path / "outside")
    assert is_allowed(run_dir, str(run_dir / "base"))
    assert is_allowed(run_dir, "/where/it/was/trained/base")
    for odd in (run_dir / "out", run_dir / "../outside", tmp_path / "outside", "/etc/out", "file:///etc", "a\0b"):
        assert not is_allowed(run_dir, str(odd)), odd


def test_the_error_names_the_paths_and_the_flag(run_dir: Path) -> None:
    with pytest.raises(ValueError, match=rf"--storage_path={STORE}, --policy.path=owner/base, .*--trust_run=true"):
        require_allowed(run_dir, external_paths(CONFIG), trust_run=False)
    require_allowed(run_dir, external_paths(CONFIG), trust_run=True)
    record_paths(run_dir, CONFIG)
    require_allowed(run_dir, external_paths(CONFIG), trust_run=False)


@pytest.mark.parametrize("command", [("eval",), ("export", "out")])
def test_no_command_contacts_an_unrecorded_address(run_dir: Path, tmp_path: Path, capsys, command) -> None:
    name, *more = command
    words = [name, str(run_dir), *(str(tmp_path / one) for one in more)]
    assert cli.main(words) == 2
    assert f"--storage_path={STORE}" in capsys.readouterr().err
    assert asked == []
    cli.main([*words, "--trust_run=true"])
    assert asked


@pytest.mark.parametrize("finished", [False, True])
def test_a_report_reads_no_store(run_dir: Path, finished: bool) -> None:
    if finished:
        write_summary(run_dir, summary(checkpoint_place=STORE, checkpoints=(5,)))
    record_paths(run_dir, CONFIG)
    assert read_run(run_dir).checkpoints.steps == ((5,) if finished else None)
    assert asked == []
