"""List the files of the repository."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def repository_files() -> list[Path]:
    """Return files that git tracks or would add, relative to ROOT; without git, all but hidden ones."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if (ROOT / ".git").exists() and done.returncode == 0:
        names = [Path(name) for name in done.stdout.split("\0") if name]
    else:
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [name for name in names if not any(part.startswith((".", "__pycache__")) for part in name.parts)]
    return sorted({name for name in names if (ROOT / name).is_file()})
