"""Folders below a URL: fetched once per machine, complete and verified, or not at all."""

import json
from pathlib import Path

import fsspec
import pytest

from vlatune.policies.base_folder import resolve_folder
from vlatune.storage.root import Root
from vlatune.storage.url_folder import SUMS, fetch_folder, files_below, upload_folder
from vlatune.train.base_source import BaseSource, hash_base, local_base

PATTERNS = ("*.json", "*.bin")


@pytest.fixture
def root(tmp_path, monkeypatch, request) -> Root:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Root(f"memory://{request.node.name}/folder", has_checksums=False)


def make_folder(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "inner/weights.bin").write_bytes(bytes(range(256)) * 100)
    (folder / "code.py").write_text("raise SystemExit")
    return folder


def upload(folder: Path, root: Root) -> None:
    upload_folder(folder, files_below(folder, PATTERNS), root)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_below(folder, ("*",))}


def test_folder_is_uploaded_and_fetched_once(tmp_path, root):
    upload(make_folder(tmp_path / "own"), root)
    fetched = fetch_folder(root, PATTERNS)
    assert contents(fetched) == {name: one for name, one in contents(tmp_path / "own").items() if name != "code.py"}
    (fetched / "kept").touch()
    assert fetch_folder(root, PATTERNS) == fetched
    assert (fetched / "kept").exists()


def test_folder_that_changed_is_fetched_again(tmp_path, root):
    fs = fsspec.filesystem("memory")
    fs.pipe_file(root.join("config.json"), b"{}")
    first = fetch_folder(root, PATTERNS)
    fs.pipe_file(root.join("config.json"), b'{"a": 1}')
    assert contents(fetch_folder(root, PATTERNS)) == {"config.json": b'{"a": 1}'}
    assert contents(first) == {"config.json": b"{}"}


@pytest.mark.parametrize("damage", ["other bytes", "a file more", "sums of nothing"])
def test_damaged_folder_is_rejected_and_leaves_nothing(tmp_path, root, damage):
    upload(make_folder(tmp_path / "own"), root)
    fs = fsspec.filesystem("memory")
    if damage == "other bytes":
        fs.pipe_file(root.join("inner/weights.bin"), bytes(25600))
    elif damage == "a file more":
        fs.pipe_file(root.join("more.json"), b"{}")
    else:
        fs.pipe_file(root.join(SUMS), json.dumps([]).encode())
    with pytest.raises((RuntimeError, ValueError), match="upload it again"):
        fetch_folder(root, PATTERNS)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_node_takes_the_drivers_folder_or_fetches_the_same_content(small_base, tmp_path, root):
    source = BaseSource(str(small_base), hash_base(small_base), url=root.url)
    assert local_base(source) == str(small_base)
    upload_folder(small_base, files_below(small_base, ("*.json", "*.safetensors", "tokenizer*")), root)
    elsewhere = BaseSource(str(tmp_path / "none"), source.content, url=root.url)
    fetched = Path(local_base(elsewhere))
    assert fetched != small_base
    assert hash_base(fetched) == source.content
    assert resolve_folder(root.url, None) == fetched
    with pytest.raises(Exception, match="differs from the driver's"):
        local_base(BaseSource(str(tmp_path / "none"), "other", url=root.url))
    with pytest.raises(Exception, match="--storage_path"):
        local_base(BaseSource(str(tmp_path / "none"), "other", url=None))
