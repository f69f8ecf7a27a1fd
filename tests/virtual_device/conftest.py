"""The library of the virtual device, built once per torch version, and processes that use it."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from virtual_device.backend import build


@pytest.fixture(scope="session")
def virtual_library(pytestconfig: pytest.Config) -> Path:
    folder = pytestconfig.cache.mkdir("virtual_device")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test processes wait for the one that compiles
        try:
            return build(folder)
        except FileNotFoundError as error:
            pytest.skip(str(error))


def run_program(program: str, library: Path, *arguments: str) -> list[Any]:
    """Run a program of this folder; return its lines of JSON."""
    words = [sys.executable, "-m", f"virtual_device.{program}", str(library), *arguments]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
