"""The copy of a run folder in storage: what is copied, when records count as safe, and when a folder is restored."""

import json
import threading
from pathlib import Path

import fsspec
import pytest
from waiting import wait_until

from vlatune.run.mirror import Mirror, list_mirror, restore
from vlatune.run.opened_run import opened_run
from vlatune.run.run_folder import EVENTS_FILE, METRICS_FILE
from vlatune.storage.root import Root
from vlatune.train.records import RunWriter

STORAGE = "memory://runs"


@pytest.fixture
def root(tmp_path) -> Root:
    return Root(f"{STORAGE}/{tmp_path.name}", has_checksums=False)


def write(folder: Path, **files: str) -> Path:
    (folder / "logs/ray").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", "/").replace("_jsonl", ".jsonl").replace("_json", ".json")).write_text(text)
    return folder


def copy(folder: Path, root: Root) -> None:
    Mirror(folder, root, lambda: None).close()


def start(time_s: float) -> str:
    return json.dumps({"event": "start", "optimizer_step": 0, "time_s": time_s}) + "\n"


def test_small_files_of_the_run_are_copied_and_removed_ones_go(tmp_path, root):
    folder = write(tmp_path / "run", config_json="{}", summary_json="{}", other_json="{}", logs__worker_json="{}")
    write(folder, logs__ray__session_json="{}")
    (folder / "data.json").symlink_to(folder / "other.json")
    copy(folder, root)
    assert set(list_mirror(root)) == {"config.json", "summary.json", "logs/worker.json"}
    (folder / "summary.json").unlink()
    fsspec.filesystem("memory").pipe_file(root.join("checkpoints/00000001/manifest.json"), b"{}")
    copy(folder, root)
    assert set(list_mirror(root)) == {"config.json", "logs/worker.json"}
    assert root.exists("checkpoints/00000001/manifest.json")


def test_checkpoint_waits_until_its_records_are_copied(tmp_path, root):
    gate = threading.Event()
    mirror = Mirror(tmp_path, root, lambda: gate.wait(60))
    writer = RunWriter(tmp_path, 0, mirror, log_samples=False)
    metrics = (METRICS_FILE, {"optimizer_step": 1, "loss": 0.5})
    event = (EVENTS_FILE, {"event": "checkpoint", "optimizer_step": 1, "time_s": 1.0})
    writer.write((0, [metrics, event, metrics]))
    assert (writer.received, writer.acknowledged) == (3, 1)
    gate.set()
    wait_until(lambda: writer.acknowledged == 3)
    assert root.read_bytes(METRICS_FILE) == (tmp_path / METRICS_FILE).read_bytes()
    writer.close()
    mirror.close()


def test_store_that_fails_does_not_hold_the_run(tmp_path, root, capsys):
    failing = iter([OSError("it is away")])

    def check() -> None:
        for error in failing:
            raise error

    write(tmp_path, config_json="{}")
    mirror = Mirror(tmp_path, root, check)
    wait_until(lambda: mirror.is_done(mirror.request()) or "it is away" in capsys.readouterr().err)
    mirror.close()
    assert root.exists("config.json")


def test_missing_or_older_folder_is_restored(tmp_path, root):
    checked: list[Path] = []
    here, there = tmp_path / "here", tmp_path / "there"
    assert not restore(here, root, checked.append)
    copy(write(here, config_json='{"a": 1}', events_jsonl=start(1)), root)
    assert restore(there, root, checked.append)
    assert (there / "config.json").read_text() == '{"a": 1}'
    assert not restore(there, root, checked.append)
    write(there, events_jsonl=start(1) + start(2), metrics_jsonl="{}\n")
    assert not restore(there, root, checked.append), "it is newer than the copy"
    copy(there, root)
    assert restore(here, root, checked.append)
    assert (here / "metrics.jsonl").read_text() == "{}\n"
    assert len(checked) == 2


def test_rejected_run_changes_nothing(tmp_path, root):
    copy(write(tmp_path / "here", config_json="{}"), root)

    def check(_: Path) -> None:
        raise ValueError("other settings")

    with pytest.raises(ValueError, match="other settings"):
        restore(tmp_path / "there", root, check)
    assert not (tmp_path / "there").exists()


def test_opened_run_uses_the_storage_it_is_read_from(tmp_path, root):
    config = {"storage_path": "s3://elsewhere", "policy": {"path": "/no/such/base"}}
    data = {"base": "0123456789abcdef"}
    copy(write(tmp_path, config_json=json.dumps(config), data_json=json.dumps(data), samples_jsonl="{}"), root)
    with opened_run(root.url) as run:
        settings = json.loads((run.folder / "config.json").read_text())
        assert not (run.folder / "samples.jsonl").exists()
    assert not run.folder.exists()
    base = f"{STORAGE}/bases/0123456789abcdef"
    assert settings == {"storage_path": STORAGE, "policy": {"path": base}}
    assert set(run.allowed) == {STORAGE, base}


@pytest.mark.parametrize("name", ["../../secrets", "s3://attacker/x", 7, "0123456789abcdeg"])
def test_run_cannot_choose_another_place_for_its_base(tmp_path, root, name):
    config, data = {"policy": {"path": "/no/such/base"}}, {"base": name}
    copy(write(tmp_path, config_json=json.dumps(config), data_json=json.dumps(data)), root)
    with opened_run(root.url) as run:
        assert run.base is None
        assert set(run.allowed) == {STORAGE}


def test_messages_name_the_url(root):
    with pytest.raises(ValueError, match=f"^'{root.url}' is damaged$"), opened_run(root.url) as run:
        raise ValueError(f"'{run.folder}' is damaged")
