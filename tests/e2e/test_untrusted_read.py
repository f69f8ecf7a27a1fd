"""Hostile datasets given to `read_lerobot`: the error names what is wrong, and no payload runs in a read task."""

import shutil
from pathlib import Path

import pytest
import ray
from unit.storage.pickled_columns import put_pickled_type, put_pickles
from unit.untrusted.damage import (
    DATA,
    TASKS,
    VIDEO,
    claim_frames,
    column,
    fifo,
    large_image,
    link_out,
    long_list,
    number,
    table,
    text,
    truncate,
)

from vlatune import cli, read_lerobot

REJECTED = {
    "NaN in a state": (column(DATA, "observation.state", number(3, 0, float("nan"))), "frame 3"),
    "infinity in an action": (column(DATA, "action", number(0, 1, -float("inf"))), "'action'"),
    "a data file is a link out": (link_out(DATA), "outside of"),
    "a video is a FIFO": (fifo(VIDEO), "is a FIFO"),
    "a video is an SDP file": (text(VIDEO, "v=0\nm=video 5004 RTP/AVP 96\n"), VIDEO),
    "a video of 10 million frames": (claim_frames(10_000_000), "VLATUNE_LIMIT_SCALE=2"),
    "half a video": (truncate(VIDEO, 0.6), VIDEO),
    "a list of 5 million values": (table(DATA, lambda: long_list(5_000_000)), "VLATUNE_LIMIT_SCALE=2"),
    "an image of 13,000 x 13,000": (large_image(13_000), "169,000,000"),
}


@pytest.fixture
def dataset(dataset_v3: Path, tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    return Path(shutil.copytree(dataset_v3, tmp_path / "dataset"))


def read(dataset: Path) -> str:
    with pytest.raises((ValueError, RuntimeError, ray.exceptions.RayTaskError)) as caught:
        read_lerobot(str(dataset), resize=(16, 16), action_horizon=2).take_all()
    return str(caught.value)


@pytest.mark.parametrize(("damage", "mention"), REJECTED.values(), ids=REJECTED)
def test_damaged_files_are_rejected(damage, mention, dataset, ray_local) -> None:
    damage(dataset)
    assert mention in " ".join(read(dataset).split())


@pytest.mark.parametrize(("file", "name", "nested"), [(TASKS, "task", False), (DATA, "action", True)])
def test_pickles_do_not_run_in_read_tasks(file, name, nested, dataset, tmp_path, ray_local) -> None:
    put_pickles(dataset / file, name, tmp_path / "code-ran", nested=nested)
    put_pickled_type(dataset / DATA, "note", tmp_path / "code-ran")
    assert file in read(dataset)
    assert not (tmp_path / "code-ran").exists()


def test_checksums_are_verified_in_read_tasks(dataset, ray_local) -> None:
    assert cli.main(["inspect", str(dataset), "--write_checksums=true"]) == 0
    data = bytearray((dataset / VIDEO).read_bytes())
    data[len(data) // 2] ^= 1
    (dataset / VIDEO).write_bytes(data)
    assert "meta/checksums.json" in read(dataset)
