"""What the docs say of the code is so: names on the frame's way exist, and the picture of the rooms has the real imports.

In `docs/follow_one_frame.md` a reference is `path.py:Name` or `path.py:Class.method`, with the path below src/vlatune. In
`docs/architecture.md` the picture is three fenced blocks: layers, a line each; and rooms with what they import, `room -> room room`.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from repository_files import repository_files
from test_layering import LAYERS, LEVEL, MODULES, SRC, ours, room_of

DOCS = Path(__file__).parents[1] / "docs"
FRAME = (DOCS / "follow_one_frame.md").read_text(encoding="utf-8")
REFERENCE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
EXAMPLE = "file.py:name"


def defined(tree: ast.Module) -> set[str]:
    """Functions, classes with their methods, and names that are assigned, at the top of a module."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("file", "name"), sorted(set(REFERENCE.findall(FRAME)) - {tuple(EXAMPLE.split(":"))}))
def test_a_reference_on_the_frames_way_exists(file: str, name: str) -> None:
    path = SRC / "vlatune" / file
    assert path.is_file(), f"docs/follow_one_frame.md names {file}, which is not there; where has it moved to?"
    found = defined(ast.parse(path.read_text(encoding="utf-8")))
    assert name in found, f"docs/follow_one_frame.md: {file} has no {name}; it has {', '.join(sorted(found))}"


def test_no_reference_is_written_another_way() -> None:
    """Each `...py:...` in backquotes is one that is checked, and a page on the way of a frame has some."""
    quoted = [text for text in re.findall(r"`([^`\n]+)`", FRAME) if ".py:" in text and text != EXAMPLE]
    assert len(quoted) > 40
    assert not [text for text in quoted if not REFERENCE.fullmatch(f"`{text}`")]


def block(title: str) -> list[str]:
    """The lines of the page's fenced block whose first line begins so, without that line."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    found = re.search(rf"^```\n{title}\b.*\n((?:.*\n)*?)```", page, re.MULTILINE)
    assert found, f"docs/architecture.md: no fenced block that begins with `{title}`"
    return [line for line in found[1].splitlines() if line.strip()]


def arrows(title: str) -> dict[str, set[str]]:
    lines = [line.partition("->") for line in block(title)]
    return {left.strip(): set(right.split()) for left, _, right in lines}


def house_room(module: str) -> str:
    """As in LAYERS; what lies below `dataset` is the ground that all stand on."""
    room = room_of(module)
    return "ground" if LEVEL[room] > LEVEL["dataset"] else room


def dataset_room(module: str) -> str:
    """`meta` for vlatune.dataset.meta.stats; a module that stands by itself is its own."""
    return module.split(".")[2]


def real_arrows(modules: list[str], room: Callable[[str], str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in modules:
        found.setdefault(room(name), set()).update({room(one) for one in ours(name) if one in modules} - {room(name)})
    return found


def as_drawn(found: dict[str, set[str]]) -> str:
    return "\n".join(f"{room:14}-> {' '.join(sorted(to))}".rstrip() for room, to in sorted(found.items()))


def test_the_picture_has_the_layers() -> None:
    drawn = [set(line.split()) for line in block("layer")]
    assert drawn == LAYERS, "docs/architecture.md: the layers are those of tests/test_layering.py, from above"


def test_the_picture_has_the_real_imports() -> None:
    modules = [name for name in MODULES if room_of(name)]
    real = {room: to - {"ground"} for room, to in real_arrows(modules, house_room).items() if room != "ground"}
    assert arrows("room") == real, f"docs/architecture.md: the picture should be\n{as_drawn(real)}"


def test_the_picture_of_dataset_has_the_real_imports() -> None:
    modules = [name for name in MODULES if name.startswith("vlatune.dataset.")]
    real = real_arrows(modules, dataset_room)
    assert arrows("in dataset") == real, f"docs/architecture.md: the picture should be\n{as_drawn(real)}"


PAGES = [*sorted(DOCS.glob("*.md")), *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
NOT_OURS = {"file.py", "toy_policy/__init__.py", "toy_policy/adapter.py", "toy_policy/module.py"}
"""An example of how to write a reference, and the files of a policy that the reader writes."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    files = [path.as_posix() for path in repository_files()]
    named = re.findall(r"`([\w/]+\.py)\b[^`]*`", page.read_text(encoding="utf-8"))
    lost = {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)} - NOT_OURS
    assert not lost, f"{page.name} names {', '.join(sorted(lost))}: where has it moved to?"
