"""A short, fixed part of `make fuzz`: the first cases, and those that once failed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import SPEC, make_base

from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset

CASES = 60
ONCE_BAD: tuple[int, ...] = ()
"""Cases that a long run has found."""


@pytest.mark.timeout(280)
def test_no_change_of_a_file_comes_through_as_a_crash(tmp_path: Path) -> None:
    """In a process of its own: its children are forked, which a process that has computed with torch does not bear."""
    make_dataset(tmp_path / "dataset", SyntheticSpec(**SPEC))
    make_base(tmp_path / "base", tmp_path / "dataset")
    words = [sys.executable, str(Path(__file__).parent / "fuzz.py"), f"--cases={CASES}", "--limit_s=60"]
    words += [f"--base={tmp_path / 'base'}"]
    words += ["--also", *map(str, ONCE_BAD)]
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["cases"] == CASES + len(ONCE_BAD)
    assert told["refused"] > told["cases"] // 3, "the changes are not seen"
