"""Roots: a folder, a file URL and an fsspec URL behave alike; no name leaves them; options are not printed."""

import pickle
import uuid
from pathlib import Path

import fsspec
import pytest

from vlatune.storage.root import Root

FILES = {"meta/info.json": b"{}", "data/chunk-000/file-001.parquet": b"one", "data/chunk-000/file-000.parquet": b"zero"}


@pytest.fixture(params=["folder", "file", "memory"])
def root(request, tmp_path) -> Root:
    url = {"folder": str(tmp_path), "file": f"file://{tmp_path}", "memory": f"memory://{uuid.uuid4().hex}/x"}[
        request.param
    ]
    with fsspec.url_to_fs(url)[0].transaction:
        for name, content in FILES.items():
            with fsspec.open(f"{url}/{name}", "wb", auto_mkdir=True) as file:
                file.write(content)
    return Root(url)


def test_existing_files_are_read(root):
    assert root.is_dir()
    for name, content in FILES.items():
        assert root.exists(name)
        assert root.read_bytes(name) == content
        with root.open(name) as file:
            assert file.read(1) == content[:1]
    assert not root.exists("meta/stats.json")


def test_glob_returns_sorted_relative_names(root):
    found = root.glob("data/*/*.parquet")
    assert found == ["data/chunk-000/file-000.parquet", "data/chunk-000/file-001.parquet"]
    assert [root.read_bytes(name) for name in found] == [b"zero", b"one"]
    assert root.glob("videos/*/*.mp4") == []


def test_a_missing_file_raises_file_not_found(root):
    with pytest.raises(FileNotFoundError):
        root.read_bytes("meta/stats.json")


@pytest.mark.parametrize(
    "name", ["../secret", "data/../../secret", "data/..", "/etc/passwd", "..", "data\\..\\secret", "data\0.parquet"]
)
def test_names_that_leave_the_root_are_rejected(root, name):
    for use in (root.join, root.exists, root.open, root.read_bytes):
        with pytest.raises(ValueError, match=r"leaves the dataset's folder; correct meta/info.json") as caught:
            use(name)
        assert root.url in str(caught.value)


def test_a_root_can_be_pickled(root):
    sent = pickle.loads(pickle.dumps(root))  # noqa: S301  (our own bytes)
    assert sent == root
    assert sent.read_bytes("meta/info.json") == b"{}"


def test_a_local_root_is_a_plain_path():
    assert Root("~/x").path == str(Path.home() / "x")
    assert Root("file:///data/x/").join("meta/info.json") == "/data/x/meta/info.json"


def test_missing_folders(tmp_path):
    assert not Root(str(tmp_path / "none")).is_dir()
    assert not Root(f"memory://{uuid.uuid4().hex}").is_dir()
    (tmp_path / "file").write_text("")
    assert not Root(str(tmp_path / "file")).is_dir()


def test_options_are_used_and_never_printed():
    root = Root("memory://x", {"secret": "s3cr3t"})
    assert "s3cr3t" not in repr(root)
    assert root.filesystem().storage_options["secret"] == "s3cr3t"
