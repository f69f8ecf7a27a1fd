"""Imports point one way, and Ray stays at the rim.

A room (a folder, or a file at the top) may import from its own layer and from layers below it; no two modules may
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
    {"train"},
    {"pipeline", "policies", "checkpoint", "report"},
    {"dataset"},
    {"aside", "batch", "config", "errors", "flags", "flag_help", "flag_values", "names", "random_streams", "recipes"},
    {"files", "outgoing"},
    {"limits"},
]
"""From the command line down; a room imports from its own line and from those below."""

RAY_FILES = {
    "vlatune.bench.feed_run",
    "vlatune.bench.reader",
    "vlatune.bench.reader_peers",
    "vlatune.bench.stage",
    "vlatune.bench.train_template",
    "vlatune.pipeline.coordinator",
    "vlatune.pipeline.execution",
    "vlatune.pipeline.read_lerobot",
    "vlatune.pipeline.source",
    "vlatune.pipeline.feed",
    "vlatune.pipeline.spill_meter",
    "vlatune.train.cluster",
    "vlatune.train.launch",
    "vlatune.train.lookout",
    "vlatune.train.supervise",
    "vlatune.train.trainer",
    "vlatune.train.loop",
}
"""The only modules that may import ray, at the top or inside a function."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """`dataset` for vlatune.dataset.order; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


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
    code = (
        "import ray.data\ndef f():\n    from vlatune.dataset import order\n    from vlatune.config import RunConfig\n"
    )
    found = set(imports_in("vlatune.x", ast.parse(code)))
    assert found == {"ray.data", "vlatune.dataset.order", "vlatune.config"}
    with pytest.raises(AssertionError, match="relative import"):
        list(imports_in("vlatune.x", ast.parse("from . import y")))
