"""What the person at the terminal sees while a run trains: a bar, or plain lines without a terminal.

Follows metrics.jsonl, which rank 0 writes; so it shows exactly what is recorded, and costs the workers nothing.
"""

import sys
import threading
from pathlib import Path
from typing import Any

from vlatune.outgoing import make_bar, say
from vlatune.report.run_folder import read_validation_errors
from vlatune.report.sinks import JsonlTail
from vlatune.report.verdict import CONTENTION_FINE

POLL_S = 0.25


def describe(line: dict[str, Any], held_out_error: float | None = None) -> str:
    """One interval in one line, with the newest validation; being kept from computing is told where it is worth a look."""
    held_out = "" if held_out_error is None else f"  held out {held_out_error:.4f}"
    kept = line.get("kept_share") or 0.0
    held = f"  kept {kept:.0%} ({line['kept_by']})" if kept >= CONTENTION_FINE else ""
    return (
        f"loss {line['loss']:.4f}{held_out}  grad {line['grad_norm']:.2f}  lr {line['lr']:.1e}  "
        f"{line['samples_per_s']:.0f} samples/s  wait {line['wait_share']:.1%}{held}  store {line['object_store_bytes'] / 1e6:.0f} MB"
    )


class Progress:
    """Shows steps from `metrics_file` until closed; lines that are said meanwhile come above the bar."""

    def __init__(self, metrics_file: Path, total_steps: int, *, from_step: int) -> None:
        self._file, self._total = metrics_file, total_steps
        self._tail = JsonlTail(metrics_file, from_end=True)
        self._shown = from_step
        self._last_due = 0
        self._stop = threading.Event()
        self._bar = make_bar(sys.stdout) if sys.stdout.isatty() else None
        if self._bar is not None:
            self._bar.add_task("train", total=total_steps, completed=from_step, told="starting")
            self._bar.start()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._show_new()
        if self._bar is not None:
            self._bar.stop()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            self._show_new()

    def _show_new(self) -> None:
        for line in self._tail.read_new():
            if line["optimizer_step"] > self._shown:
                self._shown = line["optimizer_step"]
                self._show(line)

    def _show(self, line: dict[str, Any]) -> None:
        errors = read_validation_errors(self._file.parent)
        told = describe(line, errors[max(errors)] if errors else None)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=line["optimizer_step"], told=told)
        elif line["optimizer_step"] == self._total or self._is_due(line["optimizer_step"]):
            say(f"step {line['optimizer_step']}/{self._total}  {told}")

    def _is_due(self, step: int) -> bool:
        """About twenty plain lines for a whole run."""
        every = max(1, self._total // 20)
        before, self._last_due = self._last_due, step // every
        return self._last_due > before
