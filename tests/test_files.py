"""The one door for files: what comes through it, what does not, and that there is no other."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlatune import files
from vlatune.files import RefusedFileError

SRC = Path(__file__).parents[1] / "src" / "vlatune"
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "copyfile", "copytree", "copy2", "load"}
OTHERS = {
    "files.py": "the door",
    "flag_values.py": "YAML, out of text that the door read",
    "checkpoint/state.py": "writes into a folder that the export has just made",
    "checkpoint/export.py": "the same",
    "checkpoint/local_store.py": "writes into a folder that it has just made",
    "checkpoint/store.py": "the same; objects are read through dataset/storage/root.py",
    "checkpoint/snapshot.py": "writes into the store's new folder",
    "train/worker/checkpointer.py": "writes into the store's new folder",
    "dataset/storage/root.py": "leads to the door, or to an object store",
    "dataset/storage/checksums.py": "through dataset/storage/root.py",
    "dataset/video/images.py": "pictures in memory, out of parquet",
    "dataset/meta/meta_v21.py": "through dataset/storage/root.py",
    "dataset/storage/parquet.py": "through dataset/storage/root.py",
    "dataset/storage/feature_files.py": "through dataset/storage/root.py",
    "dataset/reader.py": "through dataset/storage/root.py",
    "dataset/storage/remote_file.py": "objects of a store",
    "dataset/video/recorded.py": "FFmpeg, by a path or a file object of dataset/storage/root.py",
    "dataset/health/video_health.py": "through dataset/storage/root.py",
    "inspect/videos.py": "through dataset/storage/root.py",
    "report/page.py": "style and script that the package brings",
    "dataset/synthetic/writer.py": "writes into a new dataset",
    "dataset/synthetic/writer_meta.py": "writes into a new dataset",
    "dataset/meta/meta_info.py": "through dataset/storage/root.py",
    "dataset/meta/meta_v30.py": "through dataset/storage/root.py",
    "inspect/inspection.py": "through dataset/storage/root.py",
    "policies/act/act_adapter.py": "writes into a new base",
    "policies/diffusion/diffusion_module.py": "writes into a new base",
    "doctor/data_checks.py": "through dataset/storage/root.py",
    "policies/registry.py": "the entry point of an installed package",
    "policies/model_size.py": "writes into a new base",
    "pipeline/sizing.py": "/proc and /sys",
    "report/cpu_clocks.py": "/proc",
    "train/failures.py": "the stacks that a worker wrote",
    "report/kept_samples.py": "NumPy, from a file that the door opened",
    "train/driver/cluster.py": "Ray's temporary folder, which is ours",
    "train/driver/resume_rules.py": "through a checkpoint store",
    "cli.py": "the null device, once the reader of a pipe is gone",
}
"""Modules that call something of such a name -> why that opens nothing of a stranger's beside the door."""


def calls(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr in OPENING:
                yield f"{module.name}:{node.lineno}: .{function.attr}()"
            elif isinstance(function, ast.Name) and function.id == "open":
                yield f"{module.name}:{node.lineno}: open()"


def test_there_is_no_other_door() -> None:
    modules = {path.relative_to(SRC).as_posix(): path for path in SRC.rglob("*.py")}
    found = {name: list(calls(path)) for name, path in modules.items() if not name.startswith("bench/")}
    odd = [call for name, made in found.items() if name not in OTHERS for call in made]
    assert not odd, f"{odd}: files of others are opened by vlatune.files, or give the module a line in OTHERS"
    assert not [name for name in OTHERS if not found.get(name)], "OTHERS names modules that open nothing"


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
def test_all_else_is_refused_at_once(tmp_path, name) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path, target_is_directory=True)
    (root / "zero").symlink_to("/dev/zero")
    (root / "me").symlink_to("me")
    os.mkfifo(root / "fifo")
    with pytest.raises(RefusedFileError, match=r"link that leads|FIFO|folder"):
        files.read_file(root, name)


def test_the_cap_and_the_file_are_named(tmp_path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert files.read_file(tmp_path, "x", max_bytes=5) == b"12345"
    with pytest.raises(RefusedFileError, match=r"/x' has 5 bytes, more than the 4 that are read"):
        files.read_file(tmp_path, "x", max_bytes=4)


def test_a_blob_folder_that_is_a_link_is_no_cache(tmp_path) -> None:
    snapshot = tmp_path / "hub/x/snapshots/1"
    snapshot.mkdir(parents=True)
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key").write_text("x")
    (tmp_path / "hub/x/blobs").symlink_to(tmp_path / "private", target_is_directory=True)
    (snapshot / "config.json").symlink_to("../../blobs/key")
    with pytest.raises(RefusedFileError, match="leads out"):
        files.read_file(snapshot, "config.json")


@pytest.mark.parametrize("write", [files.open_to_append, files.open_to_change])
def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path, write) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(RefusedFileError):
            write(tmp_path / name)
    assert (tmp_path / "target").read_text() == "old"


def test_a_link_is_replaced_by_what_is_written(tmp_path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "old"
    assert (tmp_path / "link").read_text() == "new"
    assert not (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


def test_a_folder_is_not_made_through_a_link(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/logs").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(RefusedFileError, match="is a link"):
        files.make_folder(tmp_path / "run", "logs/tensorboard")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert files.make_folder(tmp_path / "new/run", "logs/x").is_dir()
