"""CPU seconds of every test, its own processes' among them: `make test ARGS=--cpu_seconds=FILE`, then `python tests/cpu_seconds.py FILE*`.

Wall clock says little on a machine that others share, and nothing of what a cluster does beside the test. A thread looks twice
a second at all processes that this one has started, so that one that has ended since counts with what it had taken by then. A test
that is over sooner than that has started none that count: to look after each of thousands would cost a minute itself.
"""

import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
EVERY_S = 0.5


class CpuSeconds:
    """A plugin of pytest: a line for every test, in a file for every process of tests."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w", encoding="utf-8")
        self._seen: dict[int, float] = {}
        self._lock, self._done, self._before_s, self._looked_s = threading.Lock(), threading.Event(), 0.0, 0.0
        threading.Thread(target=self._watch, name="cpu seconds", daemon=True).start()

    def pytest_collection_finish(self) -> None:
        self._write("collection")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid)

    def pytest_sessionfinish(self) -> None:
        self._done.set()
        self._write("end")
        self._file.close()

    def _write(self, name: str) -> None:
        own = resource.getrusage(resource.RUSAGE_SELF)
        now_s = self._look() + own.ru_utime + own.ru_stime
        self._file.write(json.dumps({"test": name, "cpu_s": round(now_s - self._before_s, 2)}) + "\n")
        self._file.flush()
        self._before_s = now_s

    def _watch(self) -> None:
        while not self._done.wait(EVERY_S):
            self._look()

    def _look(self) -> float:
        """Seconds that all processes below this one have taken so far, those that are gone included; as of the last look where it was just now."""
        with self._lock:
            if time.monotonic() - self._looked_s < EVERY_S / 2:
                return sum(self._seen.values())
            self._looked_s = time.monotonic()
            taken_s, children = _processes()
            waiting = list(children.get(os.getpid(), []))
            while waiting:
                pid = waiting.pop()
                waiting += children.get(pid, [])
                self._seen[pid] = max(self._seen.get(pid, 0.0), taken_s[pid])
            return sum(self._seen.values())


def _processes() -> tuple[dict[int, float], dict[int, list[int]]]:
    taken_s: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, (entry.name for entry in os.scandir("/proc"))):
        try:
            fields = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        taken_s[int(name)] = (int(fields[11]) + int(fields[12])) / TICKS
        children.setdefault(int(fields[1]), []).append(int(name))
    return taken_s, children


def main(files: list[str]) -> None:
    """By file of tests, the dearest first, with its dearest test."""
    by_file: Counter[str] = Counter()
    dearest: dict[str, tuple[float, str]] = {}
    for line in (line for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()):
        found = json.loads(line)
        file, _, test = found["test"].partition("::")
        by_file[file] += found["cpu_s"]
        dearest[file] = max(dearest.get(file, (0.0, "")), (found["cpu_s"], test))
    lines = [f"{sum(by_file.values()):8.1f}  all"]
    lines += [
        f"{cpu_s:8.1f}  {file}  ({dearest[file][0]:.1f}: {dearest[file][1]})" for file, cpu_s in by_file.most_common()
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
