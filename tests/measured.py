"""Run a `vlatune` command in a separate process: its exit code, output, seconds and peak memory."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

VLATUNE = str(Path(sys.executable).with_name("vlatune"))


@dataclass(frozen=True)
class Measured:
    code: int
    printed: str
    peak_bytes: int
    """Resident memory of the process itself at its highest."""
    seconds: float

    @property
    def text(self) -> str:
        """The output on one line."""
        return " ".join(self.printed.split())

    @property
    def last_line(self) -> str:
        return self.printed.splitlines()[-1] if self.printed else ""


def measured(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 240
) -> Measured:
    """Run `vlatune WORDS`; one that takes longer than `timeout_s` is killed and has a code below 0."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [VLATUNE, *map(str, words)],
            cwd=cwd,
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        peak_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, _peak_bytes(process.pid))
            if time.monotonic() - began_s > timeout_s:
                process.kill()
            time.sleep(0.02)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    return Measured(process.returncode, printed, peak_bytes, time.monotonic() - began_s)


def _peak_bytes(pid: int) -> int:
    """Return the highest resident memory so far; `ru_maxrss` would count the process that started it, too."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0
