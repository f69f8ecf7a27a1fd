"""docs/troubleshooting.md names messages that the code still says, each once, and every row says what to do."""

import ast
import re
from functools import cache

import pytest
from repository_files import ROOT, repository_files

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
GAP = "…"


@cache
def said() -> tuple[str, ...]:
    """Every string of the code; what an f-string puts in is a gap."""
    found: list[str] = []
    for path in repository_files():
        if path.parts[:2] == ("src", "vlatune") and path.suffix == ".py":
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(str(one.value) if isinstance(one, ast.Constant) else GAP for one in node.values)
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return tuple(found)


def test_the_page_has_messages():
    assert len(ROWS) > 30
    assert len({message for message, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("message", "means", "do"), ROWS, ids=[message[:40] for message, _, _ in ROWS])
def test_a_message_is_one_of_the_codes(message, means, do):
    """All of it in one string of the code, gap for gap; a gap at either end may be more than one."""
    assert any(message in one for one in said()), f"no string of the code holds: {message}"
    assert means
    assert do
