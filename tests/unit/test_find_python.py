"""`scripts/find_python.sh` finds a Python that runs, not just a name on PATH."""

import subprocess
import sys
from pathlib import Path

from repository_files import ROOT

DEAD = 'echo "pyenv: python3.12: command not found" >&2\nexit 127\n'
OLD = "echo\n"  # runs, but is another version
ALIVE = f'exec "{sys.executable}" "$@"\n'


def make_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(0o755)


def find(home: Path, *folders: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": ":".join(map(str, folders)), "HOME": str(home)}
    script = ROOT / "scripts" / "find_python.sh"
    return subprocess.run(["/bin/sh", str(script)], env=env, capture_output=True, text=True, check=False)


def test_a_shim_that_does_not_run_is_skipped(tmp_path) -> None:
    make_program(tmp_path / "shims" / "python3.12", DEAD)
    make_program(tmp_path / "bin" / "python3.12", ALIVE)
    found = find(tmp_path, tmp_path / "shims", tmp_path / "bin")
    assert (found.returncode, found.stdout) == (0, f"{sys.executable}\n")
    assert found.stderr == ""


def test_a_version_of_pyenv_that_is_not_selected_is_found(tmp_path) -> None:
    make_program(tmp_path / "shims" / "python3.12", DEAD)
    make_program(tmp_path / "shims" / "python3", OLD)
    make_program(tmp_path / ".pyenv" / "versions" / "3.11.7" / "bin" / "python", OLD)
    make_program(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python", ALIVE)
    assert find(tmp_path, tmp_path / "shims").stdout == f"{sys.executable}\n"


def test_without_a_suitable_version_nothing_is_printed(tmp_path) -> None:
    make_program(tmp_path / "shims" / "python3", OLD)
    found = find(tmp_path, tmp_path / "shims", tmp_path / "not a folder")
    assert (found.returncode, found.stdout, found.stderr) == (1, "", "")
