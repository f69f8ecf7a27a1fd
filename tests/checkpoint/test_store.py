"""A checkpoint is whole or not there, and damage is seen."""

from pathlib import Path

import pytest

from vlatune.checkpoint.store import (
    ASIDE_PREFIX,
    MANIFEST,
    checkpoint_path,
    find_newest,
    list_checkpoints,
    prune,
    verify,
    write_checkpoint,
)


def write(run_dir: Path, optimizer_step: int, text: str = "weights") -> Path:
    return write_checkpoint(
        run_dir, optimizer_step, lambda folder: (folder / "trainable.bin").write_text(text) and None
    )


def test_what_is_written_verifies_and_is_found(tmp_path):
    write(tmp_path, 5)
    newest = write(tmp_path, 10)
    assert verify(newest) is None
    assert find_newest(tmp_path, warn=pytest.fail) == newest == checkpoint_path(tmp_path, 10)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damage_is_seen_and_the_one_before_is_taken(tmp_path, damage):
    before, newest = write(tmp_path, 5), write(tmp_path, 10)
    file = newest / "trainable.bin"
    match damage:
        case "flip":
            file.write_text("weighty")
        case "truncate":
            file.write_text("weig")
        case "remove":
            file.unlink()
        case "manifest":
            (newest / MANIFEST).write_text('{"files":')
    warnings: list[str] = []
    assert find_newest(tmp_path, warn=warnings.append) == before
    assert len(warnings) == 1
    assert str(newest) in warnings[0]


def test_a_write_that_breaks_off_leaves_nothing_visible(tmp_path):
    before = write(tmp_path, 5)

    def fail(folder: Path) -> None:
        (folder / "trainable.bin").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path, 10, fail)
    assert list_checkpoints(tmp_path) == [before]
    prune(tmp_path, keep=3)
    assert not list((tmp_path / "checkpoints").glob(f"{ASIDE_PREFIX}*"))


def test_the_same_step_may_be_written_again(tmp_path):
    write(tmp_path, 5, "first")
    again = write(tmp_path, 5, "second")
    assert (again / "trainable.bin").read_text() == "second"
    assert verify(again) is None


def test_prune_keeps_the_newest(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    prune(tmp_path, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["00000003", "00000004"]


def test_no_checkpoints_is_none(tmp_path):
    assert find_newest(tmp_path, warn=pytest.fail) is None
