"""A checkpoint is whole or not there, damage is seen, and one valid checkpoint is there at every instant."""

import json
from pathlib import Path

import pytest

from vlatune.checkpoint.local_store import MANIFEST, REMOVING, WRITING, LocalStore, Score, parse_manifest
from vlatune.checkpoint.store import (
    absolute_storage,
    choose,
    find_newest,
    list_checkpoints,
    open_store,
    prune,
    write_checkpoint,
)

FILE, NESTED = "trainable.bin", "policy/config.json"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "checkpoints")


def write(
    store: LocalStore, step: int, text: str = "weights", loss: float | None = None, val_error: float | None = None
) -> Path:
    files = {FILE: lambda path: path.write_text(text), NESTED: lambda path: path.write_text("{}")}
    write_checkpoint(store, step, files, score=Score(loss, val_error))
    return store.path(step)


def test_what_is_written_verifies_and_is_found(store):
    write(store, 5)
    newest = write(store, 10)
    assert store.problem(10) is None
    assert find_newest(store, warn=pytest.fail) == 10
    assert list_checkpoints(store.staging.parent) == [store.path(5), newest]
    assert set(parse_manifest((newest / MANIFEST).read_bytes()).files) == {FILE, NESTED}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "nested", "manifest", "no manifest"])
def test_damage_is_detected_and_an_earlier_checkpoint_is_taken(store, damage):
    write(store, 5)
    newest = write(store, 10)
    match damage:
        case "flip":
            (newest / FILE).write_text("weightz")
        case "truncate":
            (newest / FILE).write_text("weight")
        case "remove":
            (newest / FILE).unlink()
        case "nested":
            (newest / NESTED).write_text("[]")
        case "manifest":
            (newest / MANIFEST).write_text('{"files":')
        case "no manifest":
            (newest / MANIFEST).unlink()
    warnings: list[str] = []
    assert find_newest(store, warn=warnings.append) == 5
    assert len(warnings) == 1
    assert f"WARNING: checkpoint {newest} is DAMAGED" in warnings[0]


def test_a_run_does_not_start_over_if_all_are_damaged(store):
    for step in (5, 10):
        (write(store, step) / FILE).unlink()
    with pytest.raises(ValueError, match="00000010"):
        find_newest(store, warn=lambda _: None)


def test_a_manifest_cannot_point_outside_of_its_folder(store):
    manifest = write(store, 5) / MANIFEST
    content = json.loads(manifest.read_text())
    content["files"]["../../secret"] = content["files"].pop(FILE)
    manifest.write_text(json.dumps(content))
    assert "outside of its folder" in (store.problem(5) or "")


def test_a_write_that_breaks_off_leaves_nothing(store):
    write(store, 5)

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(store, 10, {FILE: fail})
    assert [path.name for path in store.staging.iterdir()] == ["00000005"]


def test_leftovers_are_ignored_and_cleaned(store):
    write(store, 5)
    for prefix in (WRITING, REMOVING):
        (store.staging / f"{prefix}00000009").mkdir()
        (store.staging / f"{prefix}00000009" / MANIFEST).write_text("{}")
    assert store.steps() == [5]
    store.clean()
    assert [path.name for path in store.staging.iterdir()] == ["00000005"]


def test_an_intact_checkpoint_is_kept_and_a_damaged_one_is_replaced(store):
    path = write(store, 5, "first")
    write(store, 5, "second")
    assert (path / FILE).read_text() == "first"
    (path / FILE).write_text("fault")
    write(store, 5, "third")
    assert (path / FILE).read_text() == "third"
    assert store.problem(5) is None


def test_the_newest_and_the_best_are_kept(store):
    for step, loss in enumerate([0.5, 0.1, 0.4, 0.3, 0.2], start=1):
        write(store, step, loss=loss)
    prune(store, keep_last=2, keep_best=1)
    assert store.steps() == [2, 4, 5]
    write(store, 6, loss=0.9)
    prune(store, keep_last=1)
    assert store.steps() == [6]


def test_validation_decides_which_is_best_where_there_is_one(store):
    for step, loss, error in ((1, 0.1, None), (2, 0.5, 0.3), (3, 0.4, 0.2), (4, 0.3, 0.4), (5, 0.2, 0.5)):
        write(store, step, loss=loss, val_error=error)
    prune(store, keep_last=1, keep_best=2)
    assert store.steps() == [2, 3, 5]


def test_damaged_ones_are_not_among_the_best(store):
    (write(store, 1, loss=0.1) / MANIFEST).write_text("")
    write(store, 2, loss=0.5)
    write(store, 3, loss=0.6)
    prune(store, keep_last=1, keep_best=1)
    assert store.steps() == [2, 3]


def test_a_person_chooses_by_name(store):
    with pytest.raises(ValueError, match="there is no checkpoint yet"):
        choose(store, None, warn=pytest.fail)
    damaged = write(store, 5)
    write(store, 10)
    assert choose(store, None, warn=pytest.fail) == 10
    assert choose(store, "00000005", warn=pytest.fail) == choose(store, "5", warn=pytest.fail) == 5
    with pytest.raises(ValueError, match="--checkpoint=7: there is no such checkpoint; there are: 00000005, 00000010"):
        choose(store, "7", warn=pytest.fail)
    (damaged / FILE).unlink()
    with pytest.raises(ValueError, match=f"--checkpoint=5: .* is damaged \\({FILE} is missing\\)"):
        choose(store, "5", warn=pytest.fail)


def test_a_storage_path_holds_checkpoints_under_the_runs_name(tmp_path):
    store = open_store(tmp_path / "runs" / "fold", str(tmp_path / "shared"))
    assert store.where(7) == str(tmp_path / "shared" / "fold" / "checkpoints" / "00000007")
    assert absolute_storage("shared") == str(Path.cwd() / "shared")
    assert absolute_storage("s3://bucket/x") == "s3://bucket/x"
    with pytest.raises(ValueError, match=r"--storage_path: .*s4.*s3://"):
        open_store(tmp_path / "run", "s4://bucket/x")
    with pytest.raises(ValueError, match="--storage_path: URL holds a password") as error:
        open_store(tmp_path / "run", "s3://me:hunter2@bucket/x")
    assert "hunter2" not in str(error.value)
