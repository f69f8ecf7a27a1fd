"""Terminal output while a run trains: a progress bar, or log lines without a terminal.

It follows the files of the run folder, so it shows what is recorded and adds no work for the workers. Errors in it never stop a run.
"""

import contextlib
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlatune.config.settings import RunConfig
from vlatune.console import is_terminal, make_bar, printable, redacted, say, warn
from vlatune.formatting import format_seconds, plural
from vlatune.run.run_folder import METRICS_FILE, VALIDATIONS_FILE
from vlatune.run.sinks import JsonlTail
from vlatune.run.verdict import ETA_LINES, time_left_s

POLL_S = 0.5
LOG_LINES = 20
"""Number of log lines of a run without a terminal."""


class Progress:
    """Follows a run through all its attempts until closed."""

    def __init__(self, run_dir: Path, config: RunConfig) -> None:
        self._config = config
        self._metrics = JsonlTail(run_dir / METRICS_FILE, from_end=True)
        self._validations = JsonlTail(run_dir / VALIDATIONS_FILE)
        self._recent: list[dict[str, Any]] = []
        """Latest log lines of this attempt."""
        self._errors: dict[int, float] = {}
        """Optimizer step -> action error of each validation."""
        self._from_step = self._restarts = self._shown = 0
        self._bar = _open_bar(config)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._thread.start()

    def begin(self, *, from_step: int, restarts: int) -> None:
        """Start an attempt that continues after `from_step`."""
        self._shown = self._shown if restarts else from_step
        self._errors = {step: error for step, error in self._errors.items() if step <= from_step}
        self._from_step, self._restarts, self._recent = from_step, restarts, []

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.update()
        if self._bar is not None:
            with contextlib.suppress(Exception):  # the terminal may be gone
                self._bar.stop()
                if self._recent:
                    say(self._log_line(self._recent[-1]))

    def update(self) -> None:
        """Show what is new; after an error of the bar, only log lines are printed."""
        try:
            for line in self._validations.read_new():
                self._errors[line["optimizer_step"]] = line["val_action_error"]
            for line in self._metrics.read_new():
                self._add(line)
            if self._bar is not None:
                step = self._recent[-1]["optimizer_step"] if self._recent else self._from_step
                text = self._numbers(self._recent[-1]) if self._recent else "starting the workers"
                restarts = f"  {plural(self._restarts, 'restart')}" if self._restarts else ""
                self._bar.update(self._bar.task_ids[0], completed=step, text=text + restarts, refresh=True)
        except Exception as error:
            bar, self._bar = self._bar, None
            if bar is not None:
                with contextlib.suppress(Exception):
                    bar.stop()
                    warn(f"vlatune: warning: the progress bar failed ({error}); printing log lines instead")

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            self.update()

    def _add(self, line: dict[str, Any]) -> None:
        step, interval = line["optimizer_step"], max(1, self._config.steps // LOG_LINES)
        if step > self._from_step:
            self._recent = [*self._recent, line][-ETA_LINES:]
        if step > self._shown:  # not repeated after a restart
            is_due = step // interval > self._shown // interval or step == self._config.steps or len(self._recent) == 1
            self._shown = step
            if self._bar is None and is_due:
                say(self._log_line(line))

    def _log_line(self, line: Mapping[str, Any]) -> str:
        left_s = time_left_s(self._recent, self._config.steps)
        left = f"  about {format_seconds(round(left_s)).replace('.0 s', ' s')} left" if left_s else ""
        return f"step {line['optimizer_step']}/{self._config.steps}  {self._numbers(line)}{left}"

    def _numbers(self, line: Mapping[str, Any]) -> str:
        held_out = f"  held out {self._errors[max(self._errors)]:.4f}" if self._errors else ""
        return (
            f"loss {line['loss']:.4f}{held_out}  grad {line['grad_norm']:.2f}  lr {line['lr']:.1e}  "
            f"{line['samples_per_s']:.0f} samples/s  wait {line['wait_share']:.1%}  "
            f"store {line['object_store_bytes'] / 1e6:.0f} MB"
        )


def _open_bar(config: RunConfig) -> Any:
    """Start the progress bar; None without a terminal that can move its cursor."""
    if not is_terminal(sys.stdout):
        return None
    bar = make_bar(sys.stdout, transient=True)
    if bar.console.is_dumb_terminal:
        return None
    bar.add_task(printable(redacted(config.job_name)), total=config.steps, text="")
    bar.start()
    return bar
