"""Prints docs/hostile_inputs.md, the table of hostile cases: `PYTHONPATH=src python tests/hostile/page.py > docs/hostile_inputs.md`."""

import sys
from pathlib import Path

HEAD = """# Hostile and broken files, and what happens

Every row is a case of `tests/hostile/test_hostile.py`: a copy of an honest dataset, base model or run with one thing changed, and a
command. Each ends with this message and exit code, and after each no payload has run, nothing outside was read out or changed, and no
traceback or terminal escape was printed. `read_lerobot` is the Python function, whose ValueError counts as exit code 2. The rows
stand in `tests/hostile/cases.py` and `rows.py`; this page is printed by `tests/hostile/page.py`.

| what is wrong | command | says | exit |
|---|---|---|---|
"""


def page() -> str:
    from cases import CASES

    rows = [f"| {case.name} | `{_shown(case.command)}` | {_shown(case.says)} | {case.code} |" for case in CASES]
    return HEAD + "\n".join(rows) + "\n"


def _shown(text: str) -> str:
    """The command with its first operand; what a terminal would obey, as '?'."""
    words = text.split(" --dataset.root=")[0] if text.startswith("train") else text
    return "".join(one if one.isprintable() else "?" for one in words).replace("|", "\\|")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.stdout.write(page())
