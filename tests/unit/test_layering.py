"""Imports point down the layers, no cycles, and only modules named for it import Ray."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

LAYERS = [
    {"cli"},
    {"demo", "checks"},
    {"train.driver"},
    {"train.worker"},
    {"train"},
    {"evaluate"},
    {"run_setup", "export"},
    {"feed", "report"},
    {"run"},
    {"checkpoint"},
    {"policies"},
    {"data"},
    {"config"},
    {"registry", "ray_internals", "batch", "random_streams"},
    {"storage"},
    {"bounded_queue", "console", "errors", "findings", "formatting", "gpu_driver"},
]
"""Layers, from the command line down. A package imports from its own layer and the layers below."""


def may_import_ray(module: str) -> bool:
    name = module.rpartition(".")[2]
    return name.startswith("ray") or name in ("launch", "read_lerobot")


LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    """Return `data` for vlatune.data.order.sample_order, `train.driver` for vlatune.train.driver.launch."""
    parts = module.split(".")[1:]
    inner = ".".join(parts[:2])
    return inner if inner in LEVEL else "".join(parts[:1])


MODULES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


def imports_in(module: str, tree: ast.AST) -> Iterator[str]:
    """Yield full names of imports; `from a import b` gives a.b if that is a module, else a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import; use the full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


@cache
def imports_of(module: str) -> frozenset[str]:
    return frozenset(imports_in(module, ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def ours(module: str) -> frozenset[str]:
    """Return the modules of vlatune that a module imports, without the package itself."""
    return frozenset(name for name in imports_of(module) if name in MODULES and name not in ("vlatune", module))


@pytest.mark.parametrize("module", [name for name in MODULES if package_of(name)])
def test_imports_point_down(module: str) -> None:
    assert package_of(module) in LEVEL, f"{module}: add the package '{package_of(module)}' to LAYERS"
    up = [name for name in ours(module) if LEVEL[package_of(name)] < LEVEL[package_of(module)]]
    assert not up, f"{module} imports {', '.join(up)}, which is above it in LAYERS"


def test_no_modules_import_each_other_in_a_cycle() -> None:
    try:
        TopologicalSorter({name: ours(name) for name in MODULES if name != "vlatune"}).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def test_only_ray_modules_import_ray() -> None:
    users = {name for name in MODULES if any(one.partition(".")[0] == "ray" for one in imports_of(name))}
    assert all(map(may_import_ray, users)), sorted(user for user in users if not may_import_ray(user))


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, vlatune; print(*({'torch', 'ray', 'lerobot', 'numpy', 'pyarrow', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
