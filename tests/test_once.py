"""What there is one of: nothing outlives a run in its process, and one piece of code knows one thing."""

import ast
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from repository_files import ROOT

from vlatune import cli, run_setup
from vlatune.batch import TASK, TOKENS
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.storage import checksums
from vlatune.dataset.storage.checksums import CHECKSUMS
from vlatune.dataset.storage.remote_fs import filesystem_for
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video.decoder import VideoPlace, decode_into
from vlatune.dataset.video.recorded import Recorded
from vlatune.policies.tokenizer import Tokenise
from vlatune.report.run_folder import RunFolder
from vlatune.train.driver import launch

SRC = ROOT / "src" / "vlatune"
MODULES = {path.relative_to(SRC).as_posix(): ast.parse(path.read_text("utf-8")) for path in sorted(SRC.rglob("*.py"))}


# Nothing outlives a run

KEPT = {
    "checksums.py: _sums": "asked anew when a dataset's metadata is read, and before a file is refused",
    "checksums.py: _verified": "by the file's version and its sum",
    "decoder.py: _decoders": "by the file's version and what info.json says of it",
    "generate.py: @lru_cache": "pure, over numbers",
    "images.py: _streams": "by the file's version",
    "image_ops.py: _OWN": "memory that every picture overwrites before it is read",
    "ray_internals.py: @cache": "what the installed Ray has",
    "ray_internals.py: OFTEN": "how many turns are under way now: none between two runs",
    "registry.py: @cache": "what is installed on the path that it was asked with",
    "remote_file.py: edges": "by the object and its version",
    "remote_fs.py: _instances": "by the options and the variables that it was made of",
    "tables.py: _cache": "by the file's version",
    "watchdog.py: _mine": "a thread to make calls in; what it was given goes with the call",
    "watchdog.py: _of_parent": "threads of the process that forked this one: kept from being let go, never asked",
    "tokenizer.py: @lru_cache": "by the versions of the files",
}
"""What a process keeps -> why a second run in it sees nothing of the first."""
EMPTY = ("{}", "[]", "set()", "dict()", "list()", "OrderedDict()", "deque()")


def kept_by(name: str, tree: ast.Module) -> Iterator[str]:
    """Caches of functions; at the top of a module, collections that begin empty, which somebody fills, and instances of
    classes that may change."""
    short = name.rpartition("/")[2]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            called = [ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list]
            yield from (f"{short}: @{one}" for one in called if one in ("cache", "lru_cache"))
        elif isinstance(node, ast.Global):
            yield from (f"{short}: global {one}" for one in node.names)
    changing = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not is_frozen(node)} | {"local"}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        made = ast.unparse(node.value.func).rpartition(".")[2] if isinstance(node.value, ast.Call) else ""
        if ast.unparse(node.value) in EMPTY or made in (*changing, "defaultdict", "WeakValueDictionary"):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield f"{short}: {ast.unparse(target)}"


def is_frozen(node: ast.ClassDef) -> bool:
    return any("frozen=True" in ast.unparse(one) for one in node.decorator_list)


CONSTANTS = {"base.py: NO_STATS", "base.py: NO_OVERRIDES", "harness.py: NO_SETTINGS"}
"""Empty, and nobody fills them."""


def test_what_a_process_keeps_is_known() -> None:
    found = {one for name, tree in MODULES.items() for one in kept_by(name, tree)} - CONSTANTS
    assert found == set(KEPT), "a second run in the process must not see it: key it by content, and say so in KEPT"


def test_the_search_sees_what_is_kept() -> None:
    code = "import x\na: dict[int, str] = {}\nb = OrderedDict()\n@x.lru_cache(maxsize=4)\ndef f():\n    global g\nC = {1: 2}"
    code += "\nclass D: ...\n@dataclass(frozen=True)\nclass E: ...\nd = D()\ne = E()\nh = threading.local()"
    found = {"m.py: a", "m.py: b", "m.py: @lru_cache", "m.py: global g", "m.py: d", "m.py: h"}
    assert set(kept_by("d/m.py", ast.parse(code))) == found


def test_a_tokenizer_that_was_replaced_is_read_anew(small_base, tmp_path) -> None:
    folder = Path(shutil.copytree(small_base / "tokenizer", tmp_path / "tokenizer"))
    prompt, tokenise = {TASK: np.array(["do it"], dtype=object)}, Tokenise(str(folder / "tokenizer.json"), 8, 0)
    before = tokenise(prompt)[TOKENS]
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert tokenise(prompt)[TOKENS].tolist() != before.tolist()


def test_a_store_is_opened_anew_with_other_credentials(monkeypatch) -> None:
    first = filesystem_for("memory://x", {})
    assert filesystem_for("memory://x", {}) is first
    monkeypatch.setenv("AWS_PROFILE", "another")
    assert filesystem_for("memory://x", {}) is not first


def test_a_video_is_held_against_what_info_json_says_now(dataset_v3) -> None:
    meta = load_meta(str(dataset_v3))
    camera = meta.cameras[0]
    file = meta.video_path(0, camera)
    out, fits = np.zeros((1, 3, 96, 96), np.uint8), VideoPlace("d", 0, camera, file, Recorded(96, 96, meta.fps))
    decode_into(str(dataset_v3 / file), [0.0], out, tolerance_s=0.01, place=fits)
    other = replace(fits, recorded=Recorded(96, 96, 2 * meta.fps))
    with pytest.raises(ValueError, match=r"frames per second, meta/info\.json says"):
        decode_into(str(dataset_v3 / file), [0.0], out, tolerance_s=0.01, place=other)


def test_checksums_of_a_store_are_those_of_now(dataset_v3) -> None:
    url, memory = f"memory://once-{os.getpid()}", fsspec.filesystem("memory")
    memory.put(str(dataset_v3), f"/once-{os.getpid()}", recursive=True)
    root, name = Root(url), load_meta(url).data_path(0)  # none yet

    def upload(data: bytes) -> None:
        sums = listed(dataset_v3) | {name: hashlib.sha256(data).hexdigest()}
        memory.pipe(f"/once-{os.getpid()}/{name}", data)
        memory.pipe(f"/once-{os.getpid()}/{CHECKSUMS}", json.dumps({"sha256": sums}).encode())

    upload(b"first")
    load_meta(url)  # another run
    assert root.read_bytes(name) == b"first"
    upload(b"second")  # while a reader goes on
    assert root.read_bytes(name) == b"second"
    memory.pipe(f"/once-{os.getpid()}/{name}", b"damaged")
    with pytest.raises(ValueError, match="is damaged"):
        root.read_bytes(name)
    memory.rm(f"/once-{os.getpid()}", recursive=True)


def test_a_worker_that_looked_before_checksums_were_there_uses_them_in_the_next_run(dataset_v3, monkeypatch) -> None:
    """What a process remembers gives way to what the run's root says; processes of Ray live longer than a run."""
    place, memory = f"/later-{os.getpid()}", fsspec.filesystem("memory")
    memory.put(str(dataset_v3), place, recursive=True)
    before = load_meta(f"memory:/{place}")
    name = before.data_path(0)
    before.root.read_bytes(name)
    of_worker = dict(checksums._sums)
    memory.pipe(f"{place}/{CHECKSUMS}", json.dumps({"sha256": listed(dataset_v3) | {name: "0" * 64}}).encode())
    now = load_meta(f"memory:/{place}")  # on the driver
    monkeypatch.setattr(checksums, "_sums", of_worker)
    assert before.root.read_bytes(name)
    with pytest.raises(ValueError, match="is damaged"):
        now.root.read_bytes(name)
    memory.rm(place, recursive=True)


def listed(folder: Path) -> dict[str, str]:
    files = (one for one in folder.rglob("*") if one.is_file())
    return {one.relative_to(folder).as_posix(): hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


# One of each


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def puts_in_place(call: ast.Call) -> bool:
    """`aside.rename(path)`, `aside.replace(path)`, `os.replace(a, b)`; `text.replace(a, b)` is another thing."""
    called = ast.unparse(call.func)
    if called in ("os.rename", "os.replace", "os.renames", "shutil.move"):
        return True
    one = len(call.args) == 1 and not call.keywords
    return isinstance(call.func, ast.Attribute) and one and call.func.attr in ("rename", "replace")


def test_there_is_one_way_to_write_aside() -> None:
    users = {name for name, tree in MODULES.items() if any(map(puts_in_place, calls(tree)))}
    assert users == {"files.py"}, "write through write_aside, whole_folder or put_folder of files.py"


def test_there_is_one_datasource() -> None:
    """Benchmarks apart, which have their peers'."""
    classes = {
        f"{name}: {node.name}"
        for name, tree in MODULES.items()
        if not name.startswith("bench/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Datasource") for base in node.bases)
    }
    assert classes == {"pipeline/source.py: LeRobotSource"}


SECRETS = {"secret", "password", "credential", "token", "auth"}


def test_there_is_one_list_of_secret_words() -> None:
    """A collection of texts, two of which are such words, is a second list."""
    lists = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and len(SECRETS & {one.value for one in node.elts if isinstance(one, ast.Constant)}) >= 2
    }
    assert lists == {"console.py"}


NAMES = {
    "metrics.jsonl": "report/run_folder.py",
    "samples.jsonl": "report/run_folder.py",
    "skipped_episodes.json": "report/run_folder.py",
    "eval.json": "report/run_folder.py",
    "report.html": "report/run_folder.py",
    ".lock": "report/run_folder.py",
    ".writer.lock": "report/run_folder.py",
    "summary.json": "report/summary.py",
    "checkpoints": "checkpoint/store.py",
}
"""Of what a run puts into its folder -> the module that has it."""


def test_one_module_names_a_file_of_a_run() -> None:
    """Benchmarks apart, which read what a run leaves for everybody to see. Keys of a dict are no names of files."""
    found = {
        (node.value, name)
        for name, tree in MODULES.items()
        if not name.startswith("bench/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in NAMES and node not in keys(tree)
    }
    assert found == set(NAMES.items())


def keys(tree: ast.AST) -> set[ast.AST]:
    dicts = (node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    return {key for node in dicts for key in node.keys if key is not None}


def test_a_run_is_set_up_once(dataset_v3, tmp_path, monkeypatch) -> None:
    """Datasets, set-up and data plan, however often its workers are started; up to where Ray would be."""
    made: list[str] = []

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: made.append(name) or real(*args, **more))

    counted(run_setup, "load_meta")
    counted(run_setup, "find_bad_episodes")
    counted(run_setup, "DataPlan")
    monkeypatch.setattr(launch, "local_ray", stop_before_ray)
    flags = [f"--dataset.root={dataset_v3}", "--recipe=tiny", "--dataset.on_bad_episode=skip"]
    assert cli.main(["train", *flags, f"--output_dir={tmp_path / 'run'}"]) == cli.FAILED
    assert sorted(made) == ["DataPlan", "find_bad_episodes", "load_meta"]


def stop_before_ray(config: RunConfig, folder: RunFolder, run: Any) -> Any:
    raise RuntimeError("Ray would start here")


def test_the_data_plan_is_sent_with_the_setup(dataset_v3, small_base) -> None:
    setup = run_setup.make_setup(
        RunConfig(dataset=DatasetConfig(root=(str(dataset_v3),)), policy=PolicyConfig(path=str(small_base)))
    )
    plan = setup.data_plan
    assert setup.with_lanes(setup.order.lanes).data_plan is plan  # a restart
    sent = pickle.loads(pickle.dumps(setup))  # noqa: S301 (our own bytes)
    assert "data_plan" in vars(sent)
    assert sent.data_plan.batch_size == RunConfig().batch_size
    assert setup.with_lanes(1).data_plan.order.lanes == 1
