"""SECURITY.md is true in what can be looked up: the tests and rows that it names exist; and what no module may call."""

import ast
import re
from fnmatch import fnmatch

import pytest
from page import page
from repository_files import ROOT
from test_hostile import CASES

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "joblib.load",
    "marshal.loads",
    "yaml.unsafe_load",
}


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


def test_nothing_in_src_unpickles_or_evaluates() -> None:
    found = [
        f"{path.name}:{node.lineno}: {ast.unparse(node.func)}"
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN
    ]
    assert not found
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    assert not any("trust_remote_code=True" in text or "allow_pickle=True" in text for text in texts)


def test_the_page_of_hostile_inputs_is_the_table() -> None:
    written = (ROOT / "docs/hostile_inputs.md").read_text(encoding="utf-8")
    assert written == page(), "print it anew: PYTHONPATH=src python tests/hostile/page.py > docs/hostile_inputs.md"
