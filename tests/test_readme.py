"""The README's file tree is the real one.

Under the heading "## The tree" stands a fenced block with one name per line: first the name, then, after spaces, a
comment. A folder ends with a slash, and what is inside it stands below it, indented further:

    src/vlatune/
      cli.py          the command line
      dataset/        datasets on disk
        meta.py       what meta/ says
    tests/            mirrors src

It lists every module under src/vlatune (no __init__.py) and every folder at the top.
"""

import re
from collections.abc import Iterable

import pytest
from repository_files import ROOT, repository_files


def listed_paths(block: Iterable[str]) -> list[str]:
    """The paths of an annotated tree: `src/vlatune/`, `src/vlatune/cli.py`, ..."""
    paths: list[str] = []
    open_folders: list[tuple[int, str]] = []
    for line in block:
        if not line.strip():
            continue
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        while open_folders and open_folders[-1][0] >= indent:
            open_folders.pop()
        paths.append((open_folders[-1][1] if open_folders else "") + name)
        if name.endswith("/"):
            open_folders.append((indent, paths[-1]))
    return paths


def readme_tree() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^## The tree\n.*?^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if found is None:
        pytest.fail('README.md: no fenced block under a heading "## The tree"')
    return listed_paths(found[1].splitlines())


def real_modules() -> set[str]:
    files = [path for path in repository_files() if path.parts[:2] == ("src", "vlatune")]
    return {path.as_posix() for path in files if path.suffix == ".py" and path.name != "__init__.py"}


def real_folders() -> set[str]:
    return {path.parts[0] for path in repository_files() if len(path.parts) > 1 and not path.parts[0].startswith(".")}


def test_the_tree_lists_the_modules() -> None:
    listed = {path for path in readme_tree() if path.startswith("src/vlatune/") and path.endswith(".py")}
    assert not listed - real_modules(), "README.md lists modules that do not exist; remove them from The tree"
    assert not real_modules() - listed, "README.md misses modules; add them to The tree, each with a comment"


def test_the_tree_lists_the_folders_at_the_top() -> None:
    listed = {path.split("/")[0] for path in readme_tree() if "/" in path}
    assert not listed - real_folders(), "README.md lists folders that do not exist; remove them from The tree"
    assert not real_folders() - listed, "README.md misses folders; add them to The tree, each with a comment"


def test_a_tree_is_read_by_its_indentation() -> None:
    block = [
        "src/vlatune/",
        "  cli.py     commands",
        "  dataset/",
        "    meta.py  info",
        "",
        "  batch.py",
        "docs/  more",
    ]
    assert listed_paths(block) == [
        "src/vlatune/",
        "src/vlatune/cli.py",
        "src/vlatune/dataset/",
        "src/vlatune/dataset/meta.py",
        "src/vlatune/batch.py",
        "docs/",
    ]
