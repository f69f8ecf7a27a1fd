"""A few fixed cases of `make fuzz`, and a test of the fuzzer itself."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fuzz import MAX_BYTES, Subject, UnhandledError, run_cases

CASES = 12
FOUND: tuple[int, ...] = (105024, 301071, 900167, 900272)
"""Cases that a long run once found."""


def test_changed_files_end_in_a_handled_error(small_base: Path) -> None:
    program = str(Path(__file__).parent / "fuzz.py")
    words = [
        sys.executable,
        program,
        f"--cases={CASES}",
        f"--base={small_base}",
        "--also",
        *map(str, FOUND),
    ]
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["cases"] == CASES + len(FOUND)
    assert counts["rejected"] > counts["cases"] // 3


def nothing(folder: Path, work: Path) -> None: ...


def misbehave(folder: Path, case: int, work: Path) -> tuple[str, str, str]:
    if case == 1:
        threading.Event().wait()
    elif case == 2:
        os.abort()
    elif case == 3:
        assert bytearray(MAX_BYTES + (100 << 20))
    elif case == 4:
        raise UnhandledError("KeyError: 'x'") from KeyError("x")
    return "x", "unchanged", ""


@pytest.mark.slow
def test_the_fuzzer_detects_hangs_crashes_memory_and_unhandled_errors(tmp_path) -> None:
    for kind in ("dataset", "dataset v2.1", "base", "run", "dataset with checksums", "dataset v2.1 with checksums"):
        (tmp_path / "originals" / kind).mkdir(parents=True)
        (tmp_path / "originals" / kind / "x.json").write_text("{}")
    (tmp_path / "work").mkdir()
    subject = Subject(nothing, misbehave)
    found = run_cases(tmp_path / "originals", iter(range(6)), work=tmp_path / "work", hang_s=8.0, subject=subject)
    outcomes = {one.case: one for one in found}
    results = ["unchanged", "hang", "crash", "memory", "unhandled", "unchanged"]
    assert [outcomes[case].result for case in range(6)] == results
    assert "in misbehave" in outcomes[1].message
    assert "Aborted" in outcomes[2].message
    assert "KeyError" in outcomes[4].message
