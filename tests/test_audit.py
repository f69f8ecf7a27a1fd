"""`make audit`, on a small folder of packages; the repository's lock has a hash for every pin."""

import base64
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from repository_files import ROOT

LOCK = "one==1.0 \\\n    --hash=sha256:00\n    # via two\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    (folder / "one-1.0.dist-info").mkdir(parents=True)
    (folder / "one.py").write_text("x = 1\n")
    digest = base64.urlsafe_b64encode(sha256(b"x = 1\n").digest()).decode().rstrip("=")
    (folder / "one-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: one\nVersion: 1.0\n")
    (folder / "one-1.0.dist-info/RECORD").write_text(f"one.py,sha256={digest},6\none-1.0.dist-info/RECORD,,\n")
    return folder


def audit(lock: str, site: Path) -> tuple[int, str]:
    (site.parent / "lock").write_text(lock)
    words = [sys.executable, str(ROOT / "scripts/audit.py"), f"--lock={site.parent / 'lock'}", f"--site={site}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={"PATH": ""})
    return done.returncode, done.stdout + done.stderr


def test_what_is_as_it_was_installed_passes_and_what_was_not_looked_up_is_said(site) -> None:
    code, said = audit(LOCK, site)
    assert code == 0, said
    assert "1 pins, 1 packages installed, 0 problems" in said
    assert "NOT looked up" in said


@pytest.mark.parametrize(
    ("lock", "change", "told"),
    [
        (LOCK, lambda site: (site / "one.py").write_text("x = 2\n"), "one: one.py was changed after it was installed"),
        (LOCK, lambda site: (site / "one.py").unlink(), "one: one.py is missing"),
        (LOCK.replace("1.0", "1.1"), lambda _: None, "one 1.0 is installed, pinned is 1.1"),
        (LOCK.replace("one", "two"), lambda _: None, "one 1.0 is installed and not pinned"),
        ("one==1.0\n", lambda _: None, "one==1.0: no hash"),
    ],
)
def test_what_differs_is_named(site, lock, change, told) -> None:
    change(site)
    code, said = audit(lock, site)
    assert code == 1
    assert told in said


def test_what_runs_when_python_starts_is_named(site) -> None:
    (site / "sneaky.pth").write_text("import os; os.system('x')\n")
    assert "runs when Python starts: sneaky.pth: import os" in audit(LOCK, site)[1]


def test_every_pin_of_the_repository_has_a_hash_and_nothing_of_ours_runs_when_it_is_installed() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from audit import read_lock
    finally:
        sys.path.pop(0)
    pins, bare = read_lock((ROOT / "requirements.lock").read_text())
    assert len(pins) > 100
    assert bare == []
    assert not (ROOT / "setup.py").exists()
    assert "hooks" not in (ROOT / "pyproject.toml").read_text()
