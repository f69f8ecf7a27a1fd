"""The files that belong to the repository, for the tests that hold it to its own rules."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def repository_files() -> list[Path]:
    """What git tracks, or would after `git add`, relative to ROOT; in a copy without git, all but hidden folders."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False) if _has_git() else None
    if done is not None and done.returncode == 0:
        names = [Path(name) for name in done.stdout.split("\0") if name]
    else:
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [name for name in names if not any(part.startswith((".", "__pycache__")) for part in name.parts)]
    return sorted({name for name in names if (ROOT / name).is_file()})


def _has_git() -> bool:
    return (ROOT / ".git").exists()
