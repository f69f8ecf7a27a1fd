"""A few fixed cases of `make fuzz`."""

import json
import os
import subprocess
import sys
from pathlib import Path

CASES = 12
FOUND: tuple[int, ...] = (105024, 301071, 900167, 900272)
"""Cases that a long run once found."""


def test_changed_files_end_in_a_handled_error(small_base: Path) -> None:
    program = str(Path(__file__).parent / "fuzz.py")
    options = [f"--cases={CASES}", "--jobs=1", f"--base={small_base}", "--also", *map(str, FOUND)]
    env = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, program, *options], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["cases"] == CASES + len(FOUND)
    assert counts["rejected"] > counts["cases"] // 3
