"""Confined file access: which files below a root are read, and which are rejected."""

import os

import pytest

from vlatune.storage import files
from vlatune.storage.files import RejectedFileError


def test_a_file_and_a_link_inside_are_read(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x").write_bytes(b"abc")
    (tmp_path / "y").symlink_to("a/x")
    (tmp_path / "b").symlink_to("a", target_is_directory=True)
    assert [files.read_file(tmp_path, name) for name in ("a/x", "y", "b/x")] == [b"abc"] * 3
    (tmp_path / "root").symlink_to("a", target_is_directory=True)
    assert files.read_file(tmp_path / "root", "x") == b"abc"
    with pytest.raises(FileNotFoundError):
        files.read_file(tmp_path, "z")


@pytest.mark.parametrize("name", ["../secret", "out", "folder/secret", "zero", "fifo", "me", "a", "/etc/passwd"])
def test_other_files_are_rejected(tmp_path, name) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path, target_is_directory=True)
    (root / "zero").symlink_to("/dev/zero")
    (root / "me").symlink_to("me")
    os.mkfifo(root / "fifo")
    with pytest.raises(RejectedFileError, match=r"link to|FIFO|folder"):
        files.read_file(root, name)


def test_a_large_file_is_rejected(tmp_path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert files.read_file(tmp_path, "x", max_bytes=5) == b"12345"
    with pytest.raises(RejectedFileError, match=r"/x' has 5 bytes, above the limit of 4"):
        files.read_file(tmp_path, "x", max_bytes=4)


def test_a_linked_blobs_folder_is_not_a_hub_cache(tmp_path) -> None:
    snapshot = tmp_path / "hub/x/snapshots/1"
    snapshot.mkdir(parents=True)
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key").write_text("x")
    (tmp_path / "hub/x/blobs").symlink_to(tmp_path / "private", target_is_directory=True)
    (snapshot / "config.json").symlink_to("../../blobs/key")
    with pytest.raises(RejectedFileError, match="outside"):
        files.read_file(snapshot, "config.json")


def test_nothing_is_appended_through_a_link_or_to_a_pipe(tmp_path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(RejectedFileError):
            files.open_to_append(tmp_path / name)
    assert (tmp_path / "target").read_text() == "old"


def test_writing_replaces_a_link(tmp_path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "old"
    assert (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_folders_are_not_created_through_a_link(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/logs").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(RejectedFileError, match="is a link"):
        files.make_folder(tmp_path / "run", "logs/tensorboard")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert files.make_folder(tmp_path / "new/run", "logs/x").is_dir()
