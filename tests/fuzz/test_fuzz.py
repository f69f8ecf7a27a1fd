"""A short, fixed part of `make fuzz`: the first cases, and those that once failed; and that it sees what it looks for."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fuzz import LIMIT_BYTES, SPEC, BareError, Subject, make_base, run_cases

from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset

pytestmark = pytest.mark.early
CASES = 40
ONCE_BAD: tuple[int, ...] = (105024, 301071, 900167, 900272)
"""Cases that a long run has found."""


@pytest.mark.timeout(280)
def test_no_change_of_a_file_comes_through_as_a_crash(tmp_path: Path) -> None:
    """In a process of its own, as `make fuzz` runs it; the base is made here, where torch is imported already."""
    make_dataset(tmp_path / "dataset", SyntheticSpec(**SPEC))
    make_base(tmp_path / "base", tmp_path / "dataset")
    words = [sys.executable, str(Path(__file__).parent / "fuzz.py"), f"--cases={CASES}", "--limit_s=60", "--jobs=1"]
    words += [f"--base={tmp_path / 'base'}"]
    words += ["--also", *map(str, ONCE_BAD)]
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["cases"] == CASES + len(ONCE_BAD)
    assert told["refused"] > told["cases"] // 3, "the changes are not seen"


def begin_nothing(folder: Path, place: Path) -> None: ...


def go_wrong(folder: Path, case: int, place: Path) -> dict[str, str]:
    if case == 1:
        threading.Event().wait()
    elif case == 2:
        os.abort()
    elif case == 3:
        assert bytearray(LIMIT_BYTES + (100 << 20))
    elif case == 4:
        raise BareError("KeyError: 'x'") from KeyError("x")
    return {"kind": "run", "what": "x", "result": "fine", "said": ""}


@pytest.mark.timeout(200)
def test_a_hang_a_crash_much_memory_and_a_bare_error_are_seen(tmp_path) -> None:
    for kind in ("dataset", "older", "base", "run", "dataset with checksums", "older with checksums"):
        (tmp_path / "honest" / kind).mkdir(parents=True)
        (tmp_path / "honest" / kind / "x.json").write_text("{}")
    (tmp_path / "work").mkdir()
    found = run_cases(
        tmp_path / "honest",
        iter(range(6)),
        jobs=1,
        work=tmp_path / "work",
        limit_s=8.0,  # to fill a gigabyte takes seconds on a busy machine
        subject=Subject(begin_nothing, go_wrong),
    )
    outcomes = {one.case: one for one in found}
    assert {case: one.result for case, one in outcomes.items()} == {
        0: "fine",
        1: "hang",
        2: "crash",
        3: "memory",
        4: "bare",
        5: "fine",
    }
    assert "in go_wrong" in outcomes[1].said, "where it hangs is told"
    assert "Aborted" in outcomes[2].said
    assert "KeyError" in outcomes[4].said
