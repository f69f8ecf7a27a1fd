"""[ray] Check every node of a cluster before workers start, with one small task per node.

Readers run on every node, so each needs the dataset. Nodes that can run a training worker also need
the checkpoints, and the base model or a place to get it from.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import absolute_storage, open_store
from vlatune.config.settings import RunConfig
from vlatune.findings import Finding
from vlatune.run_setup import Inputs
from vlatune.storage.root import Root
from vlatune.train.base_source import REMEDY, BaseSource, find_source, has_base
from vlatune.train.fingerprint import PACKAGES

ANSWER_S = 120.0
MAX_SKEW_S = 60.0
INFO_FILE = "meta/info.json"
SHARE = "put it on a disk that all nodes share"


@dataclass(frozen=True)
class NodeNeeds:
    """Requirements of a node; plain values, sent to every node."""

    versions: Mapping[str, str]
    datasets: tuple[tuple[Root, str], ...]
    """Root and hash of meta/info.json of every dataset."""
    base: BaseSource | None
    """The base model; None on nodes without a training worker."""
    run_dir: str = ""
    storage_path: str | None = None
    marker: str | None = None
    """Temporary file of the driver in the folder of the checkpoints or its nearest parent, which
    training nodes must see; None if checkpoints are in an object store."""


@dataclass(frozen=True)
class NodeReply:
    problems: tuple[tuple[str, str], ...]
    """(what was found, remedy)"""
    began_s: float
    ended_s: float
    """Wall-clock times of the node."""


def check_node(needs: NodeNeeds) -> NodeReply:
    """Compare this node with the needs of the run."""
    began_s = time.time()
    problems = tuple(_problems(needs))
    return NodeReply(problems, began_s, time.time())


def _problems(needs: NodeNeeds) -> Iterator[tuple[str, str]]:
    for name, expected in needs.versions.items():
        if (found := _version(name)) != expected:
            yield f"{name} is {found}, the driver has {expected}", "install the same versions on all nodes"
    try:
        with tempfile.TemporaryFile() as probe:
            probe.write(b"vlatune")
    except OSError as error:
        yield f"no temporary file can be written ({error})", "set TMPDIR to a writable folder before `ray start`"
    for root, expected in needs.datasets:
        remedy = f"{SHARE}, or copy it to the same path on every node" if root.is_local else "check its credentials"
        yield from _compare(
            f"dataset '{root.url}'", lambda root=root: _hash(root.read_bytes(INFO_FILE)), expected, remedy
        )
    if needs.base is None:
        return
    if needs.base.url is None and not has_base(needs.base):
        yield f"base model '{needs.base.folder}' is missing or differs from the driver's", REMEDY
    store = open_store(Path(needs.run_dir), needs.storage_path)
    place = f"checkpoints in '{store.root.url}'"
    if needs.marker is not None:
        marker = Path(needs.marker)
        if not marker.exists() or not os.access(marker.parent, os.W_OK):
            yield (
                f"{place} cannot be written, or the folder is not the driver's",
                "give a --storage_path that all nodes reach (s3://...), or one on a disk that all nodes share",
            )
        return
    try:
        store.steps()
    except Exception as error:  # any error means that a worker could not use it
        yield f"{place} cannot be read ({_first_line(error)})", "check --storage_path and the node's credentials"


def _compare(what: str, read: Callable[[], str], expected: str, remedy: str) -> Iterator[tuple[str, str]]:
    try:
        found = read()
    except Exception as error:  # any error means that a task could not read it
        yield f"{what} cannot be read ({_first_line(error)})", remedy
        return
    if found != expected:
        yield f"{what} differs from the driver's", remedy


def _first_line(error: Exception) -> str:
    strerror = getattr(error, "strerror", None)
    return str(strerror or (str(error).splitlines() or [type(error).__name__])[0])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def find_skew(reply: NodeReply, sent_s: float, received_s: float) -> float:
    """Return the seconds that a node's clock is surely ahead (+) or behind (-); 0 if it may be right."""
    return max(0.0, reply.ended_s - received_s) - max(0.0, sent_s - reply.began_s)


def check_nodes(config: RunConfig, inputs: Inputs, worker: Mapping[str, float]) -> list[Finding]:
    """Check all nodes of the connected cluster; `worker` are the resources of a training worker."""
    nodes = [node for node in ray.nodes() if node["Alive"] and (node["Resources"].keys() & {"CPU", "GPU"})]
    store = open_store(config.run_dir, config.storage_path)
    with _marker(store.staging) if isinstance(store, LocalStore) else nullcontext() as marker:
        training = NodeNeeds(
            versions={name: version(name) for name in PACKAGES},
            datasets=tuple((meta.root, _hash(meta.root.read_bytes(INFO_FILE))) for meta in inputs.metas),
            base=find_source(config, inputs.policy.folder),
            run_dir=str(config.run_dir.resolve()),
            storage_path=absolute_storage(config.storage_path),
            marker=marker,
        )
        reading, sent_s = replace(training, base=None), time.time()
        tasks = [
            ray.remote(check_node)
            .options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote(training if _fits(node["Resources"], worker) else reading)
            for node in nodes
        ]
        found: list[Finding] = []
        for node, task in zip(nodes, tasks, strict=True):
            place = f"node {node['NodeManagerAddress']}"
            found += [Finding("fail", "cluster", text, place, remedy=remedy) for text, remedy in _ask(task, sent_s)]
    return found or [Finding("pass", "cluster", f"{len(nodes)} nodes have the same versions and see the same files")]


def _ask(task: object, sent_s: float) -> Iterator[tuple[str, str]]:
    try:
        reply: NodeReply = ray.get(task, timeout=max(1.0, sent_s + ANSWER_S - time.time()))  # pyright: ignore[reportCallIssue, reportArgumentType]
    except RayError as error:  # includes nodes without vlatune, and those that do not answer
        remedy = "install the same versions on all nodes, and check that they reach each other"
        yield f"the check did not run ({type(error).__name__})", remedy
        return
    yield from reply.problems
    if abs(skew_s := find_skew(reply, sent_s, time.time())) > MAX_SKEW_S:
        ahead = "ahead of" if skew_s > 0 else "behind"
        yield f"its clock is {abs(skew_s):.0f} s {ahead} the driver's", "synchronise the clocks (NTP)"


def _fits(resources: Mapping[str, float], worker: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in worker.items())


@contextmanager
def _marker(folder: Path) -> Iterator[str]:
    """Write a temporary file to a folder, or to its nearest parent that exists."""
    existing = next(one for one in (folder.resolve(), *folder.resolve().parents) if one.is_dir())
    with tempfile.NamedTemporaryFile(prefix=".vlatune-node-check-", dir=existing) as file:
        yield file.name
