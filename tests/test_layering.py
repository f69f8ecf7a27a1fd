"""Imports point one way, and Ray stays at the rim.

A room (a folder, a folder in it that has a line of its own, or a file at the top) may import from its own layer and from layers below it; no two modules may
import each other, directly or in a circle. A new room gets a line in LAYERS.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"

LAYERS = [
    {"cli"},
    {"bench", "demo", "doctor", "inspect"},
    {"train.driver"},
    {"train.worker"},
    {"train"},
    {"evaluate"},
    {"run_setup"},
    {"pipeline", "policies", "checkpoint", "report"},
    {"dataset"},
    {
        "batch",
        "config",
        "config_checks",
        "flags",
        "flag_values",
        "from_lerobot",
        "lerobot_fields",
        "random_streams",
        "recipes",
    },
    {"policies.registry", "ray_internals"},
    {"bounded_queue", "console", "errors", "files"},
    {"limits"},
]
"""From the command line down; a room, or a module that stands apart from its room, imports from its own line and below.

`train` is what driver and worker share.
"""

RAY_FILES = {
    "vlatune.bench.feed.feed_consumers",
    "vlatune.bench.reader.reader_bench",
    "vlatune.bench.peer_readers",
    "vlatune.bench.train.template_train",
    "vlatune.pipeline.coordinator",
    "vlatune.pipeline.read_lerobot",
    "vlatune.pipeline.source",
    "vlatune.pipeline.feed",
    "vlatune.ray_internals",
    "vlatune.train.driver.cluster",
    "vlatune.train.driver.feature_stage",
    "vlatune.train.driver.launch",
    "vlatune.train.heartbeat",
    "vlatune.train.driver.supervisor",
    "vlatune.train.driver.trainer",
    "vlatune.train.worker.loop",
    "vlatune.train.worker.validation",
}
"""The only modules that may import ray, at the top or inside a function."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """`dataset` for vlatune.dataset.order.sample_order, `train.driver` for vlatune.train.driver.launch; empty for the package itself."""
    parts = module.split(".")[1:]
    inner = ".".join(parts[:2])
    return inner if inner in LEVEL else "".join(parts[:1])


MODULES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


def imports_in(module: str, tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports; `from a import b` gives a.b when that is a module, else a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import; write it in full"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


@cache
def imports_of(module: str) -> frozenset[str]:
    return frozenset(imports_in(module, ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def ours(module: str) -> frozenset[str]:
    """The modules of vlatune that a module imports; the package itself carries only the version and lazy names."""
    return frozenset(name for name in imports_of(module) if name in MODULES and name not in ("vlatune", module))


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name)])
def test_imports_point_down(module: str) -> None:
    assert room_of(module) in LEVEL, f"{module}: give the room '{room_of(module)}' a place in LAYERS"
    up = [name for name in ours(module) if LEVEL[room_of(name)] < LEVEL[room_of(module)]]
    assert not up, f"{module} imports {', '.join(up)}, which lies above it in LAYERS"


def test_benchmarks_are_a_leaf() -> None:
    """Nothing of the product may lean on what measures it; only the command line starts it."""
    users = {
        name for name in MODULES if room_of(name) != "bench" and any(room_of(one) == "bench" for one in ours(name))
    }
    assert users == {"vlatune.cli"}


@pytest.mark.parametrize("module", [name for name in MODULES if room_of(name) == "bench"])
def test_benchmarks_use_public_names_alone(module: str) -> None:
    """What a benchmark needs of the product, or of another benchmark, is public there: else it measures what no user has."""
    private = list(private_names(ast.parse(MODULES[module].read_text(encoding="utf-8"))))
    assert not private, f"{module}: {'; '.join(private)}: give the part a public name where it is made"


def test_processes_of_benchmarks_are_modules() -> None:
    """`python -m NAME`, with the name in a string: no import tells where it has moved to."""
    named = {
        node.value
        for name in MODULES
        if room_of(name) == "bench"
        for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("vlatune.bench.")
    }
    assert len(named) >= 5
    for name in named:
        assert name in MODULES, f"{name}: there is no such module"
        assert '__name__ == "__main__"' in MODULES[name].read_text(encoding="utf-8"), (
            f"{name} does nothing when it is run"
        )


OWN = {"self", "cls", "sys", "func", "tensor.untyped_storage()"}
"""Objects of the module itself; and Python's and torch's, in the spy of host syncs."""


def private_names(tree: ast.AST) -> Iterator[str]:
    """Underscore names of vlatune's that a module imports, or takes from anything but `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vlatune"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) not in OWN:
            yield ast.unparse(node)


def test_private_names_are_seen() -> None:
    code = "from vlatune.x import _a, b\nself._own\nself._part._c()\nsuper()._d()\nb._e\nb.__class__\n"
    assert set(private_names(ast.parse(code))) == {"vlatune.x._a", "self._part._c", "super()._d", "b._e"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_two_modules_have_one_name() -> None:
    names = [path.name for path in MODULES.values() if path.name != "__init__.py"]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, (
        f"{', '.join(sorted(twice))}: two modules have this name; a reader must be able to tell them apart"
    )


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({name: ours(name) for name in MODULES if name != "vlatune"}).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' <- '.join(error.args[1])}")


def test_ray_stays_at_the_rim() -> None:
    users = {name for name in MODULES if any(one.partition(".")[0] == "ray" for one in imports_of(name))}
    assert users <= RAY_FILES, f"{', '.join(sorted(users - RAY_FILES))}: only the modules in RAY_FILES may import ray"


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, vlatune; print(*({'torch', 'ray', 'lerobot', 'numpy', 'pyarrow', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_walk_sees_all_kinds_of_imports() -> None:
    code = "import ray.data\ndef f():\n    from vlatune.dataset.order import sample_order\n    from vlatune.config import RunConfig\n"
    found = set(imports_in("vlatune.x", ast.parse(code)))
    assert found == {"ray.data", "vlatune.dataset.order.sample_order", "vlatune.config"}
    with pytest.raises(AssertionError, match="relative import"):
        list(imports_in("vlatune.x", ast.parse("from . import y")))
