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


def test_unchanged_packages_pass_and_code_that_runs_when_python_starts_is_named(site) -> None:
    (site / "sneaky.pth").write_text("import os; os.system('x')\n")
    code, printed = audit(LOCK, site)
    assert code == 0, printed
    for text in ("1 pins, 1 packages installed, 0 problems", "NOT looked up", "sneaky.pth: import os"):
        assert text in printed


@pytest.mark.parametrize(
    ("lock", "change", "reported"),
    [
        (LOCK, lambda site: (site / "one.py").write_text("x = 2\n"), "one: one.py was changed after it was installed"),
        (LOCK, lambda site: (site / "one.py").unlink(), "one: one.py is missing"),
        (LOCK.replace("1.0", "1.1"), lambda _: None, "one 1.0 is installed, pinned is 1.1"),
        (LOCK.replace("one", "two"), lambda _: None, "one 1.0 is installed and not pinned"),
        ("one==1.0\n", lambda _: None, "one==1.0: no hash"),
    ],
)
def test_a_difference_is_named(site, lock, change, reported) -> None:
    change(site)
    code, printed = audit(lock, site)
    assert code == 1
    assert reported in printed
