"""Compare the installed packages with requirements.lock and their own hashes (`make audit`).

    python scripts/audit.py [--lock=requirements.lock] [--site=FOLDER]

Without a network: every pin has hashes, every installed package has the pinned version, and every file has the hash in
its package's RECORD, so that changes after the installation are found. Code that runs when Python starts (.pth) is
listed. With a network and pip-audit on PATH, advisories on the pinned versions are looked up. Standard library only.
"""

import argparse
import base64
import csv
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

OWN = {"vlatune", "pip", "uv", "setuptools", "wheel"}
"""Packages that are not in the lock: this project and the installers."""
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)\s*(;[^\\]*)?")


def read_lock(text: str) -> tuple[dict[str, set[str]], list[str]]:
    """Return the pinned versions by name (platforms may differ), and the lines without a hash."""
    pins: dict[str, set[str]] = {}
    bare = []
    blocks = re.split(r"\n(?=\S)", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    for block in filter(str.strip, blocks):
        found = PIN.match(block)
        if found is None or "--hash=sha256:" not in block:
            bare.append(block.splitlines()[0])
        if found is not None:
            pins.setdefault(plain(found[1]), set()).add(found[2])
    return pins, bare


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def compare(pins: dict[str, set[str]], installed: dict[str, str]) -> Iterator[str]:
    for name, version in sorted(installed.items()):
        if name in OWN:
            continue
        if name not in pins:
            yield f"{name} {version} is installed and not pinned"
        elif version.partition("+")[0] not in {one.partition("+")[0] for one in pins[name]}:
            yield f"{name} {version} is installed, pinned is {' or '.join(sorted(pins[name]))}"


def changed_files(one: Distribution) -> Iterator[str]:
    """Yield files that differ from their package's RECORD."""
    record = one.read_text("RECORD") or ""
    for row in csv.reader(record.splitlines()):
        name, kept = row[0], row[1] if len(row) > 1 else ""
        if not kept.startswith("sha256="):
            continue
        path = Path(str(one.locate_file(name)))
        if not path.is_file():
            yield f"{one.name}: {name} is missing"
        elif _digest(path) != kept.removeprefix("sha256=").rstrip("="):
            yield f"{one.name}: {name} was changed after it was installed"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")


def starters(site: Path) -> Iterator[str]:
    """Yield the lines of .pth files that Python runs when it starts."""
    for file in sorted(site.glob("*.pth")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith(("import ", "import\t")):
                yield f"{file.name}: {line[:100]}"


def look_up(lock: Path) -> tuple[str, bool]:
    """Return the output of pip-audit, and whether it found nothing."""
    if shutil.which("pip-audit") is None:
        return (
            "advisories were NOT looked up; install pip-audit outside of .venv, and run this again with a network",
            True,
        )
    command = ["pip-audit", "--requirement", str(lock), "--require-hashes", "--disable-pip"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()[-4000:], done.returncode == 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lock", type=Path, default=Path("requirements.lock"))
    parser.add_argument("--site", type=Path, help="another site-packages than this interpreter's")
    options = parser.parse_args(argv)
    pins, bare = read_lock(options.lock.read_text())
    found = list(distributions(path=[str(options.site)]) if options.site else distributions())
    bad = [f"{line}: no hash in {options.lock}" for line in bare]
    bad += compare(pins, {plain(one.name): one.version for one in found})
    bad += [text for one in found if plain(one.name) not in OWN for text in changed_files(one)]
    sites = {options.site} if options.site else {Path(str(one.locate_file(""))) for one in found}
    started = [line for site in sorted(sites) for line in starters(site)]
    output, is_good = look_up(options.lock)
    lines = [f"{len(pins)} pins, {len(found)} packages installed, {len(bad)} problems", *bad]
    lines += [f"runs when Python starts: {line}" for line in started]
    sys.stdout.write("\n".join([*lines, output]) + "\n")
    return 1 if bad or not is_good else 0


if __name__ == "__main__":
    sys.exit(main())
