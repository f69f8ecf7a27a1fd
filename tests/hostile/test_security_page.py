"""SECURITY.md is true in what can be looked up: the tests and rows that it names exist; and what no module may call."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from typing import Any

import pytest
from cases import CASES
from page import page
from repository_files import ROOT

from vlatune import config
from vlatune.console import is_secret_name

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
LOADS = ("load", "loads", "Unpickler", "open")
FORBIDDEN = (
    {"eval", "exec", "compile", "__import__", "globals", "input"}
    | {
        f"{library}.{load}"
        for library in ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
        for load in LOADS
    }
    | {"torch.load", "torch.hub.load", "torch.jit.load", "pandas.read_pickle", "pd.read_pickle"}
    | {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all"}
    | {
        "importlib.import_module",
        "import_module",
        "importlib.util.spec_from_file_location",
        "runpy.run_path",
        "runpy.run_module",
    }
    | {"os.system", "os.popen", "tempfile.mktemp"}
    | {
        f"{torch}.{exchange}"
        for torch in ("dist", "torch.distributed", "distributed")
        for exchange in ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
    }
)
"""Calls that run what a file says, or may."""
UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
OURS = {
    "flag_values.py": "YAML with a loader that makes strings, lists and mappings of it",
    "__init__.py": "the package's own names, out of a table in it",
    "registry.py": "our own policies, out of a table in it",
    "ray_internals.py": "parts of Ray, out of a table in it",
    "cluster.py": "a formatter of log records",
    "world.py": "the demo's own sentences",
    "writer_meta.py": "the templates that a new dataset gets",
}
"""Modules that may call one of them, or fill a pattern -> why that is none of a file's."""


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\btest_\w+\b(?!\.py)", PAGE))))
def test_a_test_that_the_page_names_exists(name: str) -> None:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert any(f"def {name}(" in text for text in texts)


@pytest.mark.parametrize("file", sorted(set(re.findall(r"\btests/[\w/]+\.py\b", PAGE))))
def test_a_file_that_the_page_names_exists(file: str) -> None:
    assert (ROOT / file).is_file()


def test_the_rows_that_the_page_names_exist() -> None:
    rows = [
        row
        for part in re.findall(r"rows? (`[^`]+`(?:(?:, | to )`[^`]+`)*)", PAGE)
        for row in re.findall(r"`([^`]+)`", part)
    ]
    assert len(rows) > 15
    names = [case.name for case in CASES]
    missing = [row for row in rows if not any(fnmatch(name, f"*{row.replace('... ', '')}*") for name in names)]
    assert not missing


def nodes(kind: type[ast.AST]) -> list[tuple[str, Any]]:
    """(module and line, node) of all of a kind in src; benchmarks read only what they made."""
    return [(where, node) for where, node in all_nodes() if isinstance(node, kind)]


@cache
def all_nodes() -> list[tuple[str, ast.AST]]:
    """Once for all tests: it is half of what they cost."""
    paths = [path for path in (ROOT / "src").rglob("*.py") if "bench" not in path.parts]
    return [
        (f"{path.name}:{getattr(node, 'lineno', 0)}", node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_nothing_in_src_unpickles_or_evaluates() -> None:
    found = [
        f"{where}: {ast.unparse(node.func)}" for where, node in nodes(ast.Call) if ast.unparse(node.func) in FORBIDDEN
    ]
    assert [one for one in found if one.partition(":")[0] not in OURS] == []


def test_nothing_in_src_imports_what_unpickles() -> None:
    named = [(where, alias.name) for where, node in nodes(ast.Import) for alias in node.names]
    named += [(where, str(node.module)) for where, node in nodes(ast.ImportFrom)]
    assert [(where, name) for where, name in named if name.partition(".")[0] in UNPICKLERS] == []


def test_nothing_in_src_asks_a_library_to_run_code_of_a_file() -> None:
    words = {"trust_remote_code": True, "allow_pickle": True, "weights_only": False, "shell": True}
    found = [
        f"{where}: {word.arg}"
        for where, node in nodes(ast.Call)
        for word in node.keywords
        if word.arg in words and not (isinstance(word.value, ast.Constant) and word.value.value is not words[word.arg])
    ]
    assert found == []


def test_no_text_of_a_file_is_a_format() -> None:
    """`str.format` reaches into objects; only a pattern that stands in the code is filled."""
    found = [
        where
        for where, node in nodes(ast.Call)
        if isinstance(node.func, ast.Attribute)
        and node.func.attr in ("format", "format_map")
        and not isinstance(node.func.value, ast.Constant)
    ]
    found += [
        where
        for where, node in nodes(ast.BinOp)
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.JoinedStr)
    ]
    assert [one for one in found if one.partition(":")[0] not in OURS] == []


def test_the_page_of_hostile_inputs_is_the_table() -> None:
    written = (ROOT / "docs/hostile_inputs.md").read_text(encoding="utf-8")
    assert written == page(), "print it anew: PYTHONPATH=src python tests/hostile/page.py > docs/hostile_inputs.md"


def test_no_setting_is_for_a_secret() -> None:
    """Settings are written to config.json and are seen in lists of processes."""
    classes = [config.RunConfig, config.DoctorConfig, config.EvalConfig, config.ExportConfig, config.ReportConfig]
    classes += [config.DemoConfig]
    names = [name for one in classes for name in _names(one)]
    assert "storage_path" in names
    assert [name for name in names if is_secret_name(name)] == []


def _names(cls: Any) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        yield field.name
        if dataclasses.is_dataclass(field.default_factory):
            yield from _names(field.default_factory)
