"""The repository: no package indexes or machine paths, a complete lock, declared dependencies."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository_files import ROOT, repository_files

# Written in pieces, so that this file passes its own test.
FORBIDDEN = {
    "a package registry's host": "|".join(
        rf"(?:{first})\.{rest}"
        for first, rest in {"pypi|pythonhosted|anaconda": "org", "pytorch": "org/whl", "registry": "npmjs"}.items()
    ),
    "an index address": "--(?:extra-)?" + "index" + "-url[ =]|--find" + "-links[ =]",
    "a path of somebody's machine": r"(?<![\w.}])/(?:"
    + "|".join(("wor" + "k", "roo" + "t", r"home/\w+", r"Users/\w+"))
    + ")/",
}


def text_files() -> Iterator[tuple[str, str]]:
    for path in repository_files():
        try:
            yield path.as_posix(), (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # binary
            continue


def pins() -> dict[str, str]:
    """Return package -> version of requirements.lock."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9][\w.-]*)==([^ ;\\]+)", lock, re.MULTILINE))


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_contains(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"{what}:\n" + "\n".join(found)


def test_every_pin_has_a_hash() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[a-z0-9])", lock)
    assert len(entries) == len(pins()) > 100
    bare = [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry]
    assert not bare, f"requirements.lock: no hash for {', '.join(bare)}; run `make lock`"
    assert "://" not in lock, "requirements.lock names an address; run `make lock`"


def test_the_lock_is_compiled_from_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    wanted = [Requirement(one) for one in [*project["dependencies"], *(one for extra in extras for one in extra)]]
    stale = [str(one) for one in wanted if not one.specifier.contains(pins().get(canonicalize_name(one.name), "0"))]
    assert not stale, f"requirements.lock does not satisfy {', '.join(stale)}; run `make lock`"


NOT_IMPORTED = {"grpcio"}
"""Needed by Ray's state calls, which does not declare it."""


def imported_packages() -> set[str]:
    """Return the distributions that the modules under src import."""
    files = [path for path in repository_files() if path.parts[:2] == ("src", "vlatune") and path.suffix == ".py"]
    nodes = [node for path in files for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"vlatune"}
    owners = packages_distributions()
    return {canonicalize_name(owners[top][0]) if top in owners else top for top in tops}


def declared_packages(*, extras: bool) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [one for name, extra in project["optional-dependencies"].items() if name != "dev" for one in extra]
    return {canonicalize_name(Requirement(one).name) for one in project["dependencies"] + (optional if extras else [])}


def test_imported_packages_are_declared_and_declared_ones_used() -> None:
    assert not imported_packages() - declared_packages(extras=True), "imported, and not in pyproject.toml"
    assert not declared_packages(extras=False) - imported_packages() - NOT_IMPORTED, "in pyproject.toml, never imported"
