"""Reports of a node before workers start; clusters are in tests/e2e/test_namespaces.py."""

import hashlib
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from vlatune.storage.root import Root
from vlatune.train.base_source import BaseSource, hash_base
from vlatune.train.driver.ray_nodes import NodeNeeds, NodeReply, check_node, find_skew


def hash_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def needs(dataset_v3, small_base, tmp_path) -> NodeNeeds:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/marker").touch()
    return NodeNeeds(
        versions={"vlatune": version("vlatune"), "torch": version("torch")},
        datasets=((Root(str(dataset_v3)), hash_of(dataset_v3 / "meta/info.json")),),
        base=BaseSource(str(small_base), hash_base(small_base), url=None),
        run_dir=str(tmp_path / "run"),
        storage_path=None,
        marker=str(tmp_path / "run/marker"),
    )


def test_node_like_the_driver_has_no_problem(needs, tmp_path):
    before_s = time.time()
    reply = check_node(needs)
    assert reply.problems == ()
    assert before_s <= reply.began_s <= reply.ended_s <= time.time()
    assert check_node(replace(needs, storage_path=str(tmp_path / "store"))).problems == ()  # not created yet
    assert check_node(replace(needs, storage_path="memory://store", marker=None)).problems == ()
    assert needs.base is not None
    fetched = replace(needs.base, folder="/no/base", url="memory://store/base")
    assert check_node(replace(needs, base=fetched)).problems == ()


def changed(needs: NodeNeeds, what: str) -> NodeNeeds:
    root, _ = needs.datasets[0]
    assert needs.base is not None
    return {
        "torch": replace(needs, versions=dict(needs.versions) | {"torch": "0.1"}),
        "no-such-package": replace(needs, versions={"no-such-package": "1.0"}),
        "/no/dataset": replace(needs, datasets=((Root("/no/dataset"), ""),)),
        root.url: replace(needs, datasets=((root, "other"),)),
        "/no/base": replace(needs, base=replace(needs.base, folder="/no/base")),
        needs.base.folder: replace(needs, base=replace(needs.base, content="other")),
        needs.run_dir: replace(needs, marker="/gone"),
        "/no/storage": replace(needs, storage_path="/no/storage", marker="/no/storage/marker"),
    }[what]


@pytest.mark.parametrize("what", ["torch", "no-such-package", "/no/dataset", "/no/base", "/no/storage"])
def test_problem_is_named_with_a_remedy(needs, what):
    ((text, remedy),) = check_node(changed(needs, what)).problems
    assert what in text
    assert remedy


def test_other_contents_and_another_run_folder_are_named(needs):
    assert needs.base is not None
    for what in (needs.datasets[0][0].url, needs.base.folder, needs.run_dir):
        ((text, remedy),) = check_node(changed(needs, what)).problems
        assert what in text
        assert remedy


def test_node_without_a_training_worker_needs_the_dataset_only(needs):
    assert check_node(replace(needs, base=None, marker="/gone", storage_path="/no/storage")).problems == ()


@pytest.mark.parametrize(
    ("began_s", "ended_s", "skew_s"),
    [(101.0, 109.0, 0.0), (99.0, 100.0, -1.0), (30.0, 31.0, -70.0), (170.0, 171.0, 61.0)],
)
def test_skew_is_what_the_waiting_time_cannot_explain(began_s, ended_s, skew_s):
    assert find_skew(NodeReply((), began_s, ended_s), sent_s=100.0, received_s=110.0) == skew_s
