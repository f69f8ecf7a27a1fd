"""What the person at the terminal sees while a run trains: a view of some lines, or plain lines without a terminal.

Follows the run folder, which rank 0 writes; so it shows exactly what is recorded, and costs the workers nothing. A view is
drawn twice a second at its end, what is said meanwhile comes above it, and a plain line of the last step stays when it goes.
What a view says is a pure function of a `View`. Whatever goes wrong with it is said once: it never ends a run.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import CHECKPOINTS
from vlatune.config import RunConfig
from vlatune.console import make_view, printable, redacted, say, warn
from vlatune.report.formatting import format_bytes, format_rate, format_seconds, format_share, plural
from vlatune.report.run_folder import RunFolder
from vlatune.report.sinks import JsonlTail, read_jsonl
from vlatune.report.verdict import CONTENTION_FINE, interval_verdict

if TYPE_CHECKING:
    from vlatune.train.heartbeat import RankState

POLL_S = 0.5
LABEL_CHARS, DRAWN_CHARS, MOST_CHARS = 12, 59, 78
"""Of the left column, of lines that are drawn to fit, and of others. A line that is no wider than a window becomes stays whole."""
ETA_LINES = 10
"""Newest log lines whose steps say how long those to come will take."""
SPARK_CHARS = 14
SPARKS, PLAIN_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
BAR, PLAIN_BAR = "━╌", "#-"


class Group(Protocol):
    """The worker group of an attempt; the supervisor knows it."""

    states: "Sequence[RankState]"


@dataclass(frozen=True)
class View:
    """All that is shown, at one moment."""

    name: str
    total_steps: int
    elapsed_s: float
    step: int = 0
    waits_for: str | None = None
    """Before an attempt's first line."""
    newest: Mapping[str, Any] = field(default_factory=dict)
    """Line of metrics.jsonl."""
    to_go_s: float | None = None
    losses: Sequence[float] = ()
    errors: Mapping[int, float] = field(default_factory=dict)
    """Optimizer step -> action error of each validation."""
    restarts: int = 0
    checkpoints: Sequence[int] | None = None
    """Optimizer steps; None where they lie elsewhere."""
    store_bytes: int | None = None


def describe(line: Mapping[str, Any], held_out_error: float | None = None) -> str:
    """One interval in one line, with the newest validation; being kept from computing is told where it is worth a look."""
    held_out = "" if held_out_error is None else f"  held out {held_out_error:.4f}"
    kept = line.get("kept_share") or 0.0
    held = f"  kept {kept:.0%} ({line['kept_by']})" if kept >= CONTENTION_FINE else ""
    return (
        f"loss {line['loss']:.4f}{held_out}  grad {line['grad_norm']:.2f}  lr {line['lr']:.1e}  "
        f"{line['samples_per_s']:.0f} samples/s  wait {line['wait_share']:.1%}{held}  store {line['object_store_bytes'] / 1e6:.0f} MB"
    )


def lines(view: View, width: int, *, plain: bool = False) -> list[tuple[str, str]]:
    """(what, how much) from top to bottom, each pair at most `width` characters; `plain` without anything but ASCII."""
    made = [(view.name, _bar(view, width, BAR if not plain else PLAIN_BAR)), *_progress(view, plain=plain)]
    if view.waits_for is not None:
        made.append(("waits for", view.waits_for))
    made += [("time", _times(view)), ("saved", _saved(view))]
    if plain:
        made = [(_ascii(what), _ascii(text)) for what, text in made]
    return [(what[: LABEL_CHARS - 1], text[: max(0, width - LABEL_CHARS)]) for what, text in made]


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


def _progress(view: View, *, plain: bool) -> list[tuple[str, str]]:
    """What a log line tells; nothing before the first."""
    line = view.newest
    if not line:
        return []
    sparks = sparkline(view.losses, SPARK_CHARS, PLAIN_SPARKS if plain else SPARKS)
    made = [("loss", f"{line['loss']:.4f}  {sparks}  grad {line['grad_norm']:.2f}  rate {line['lr']:.1e}")]
    if hardest := _hardest(line.get("loss_by_task") or {}):
        made.append(("hardest", hardest))
    if view.errors:
        newest, best = max(view.errors), min(view.errors, key=lambda step: (view.errors[step], step))
        best_told = "" if best == newest else f", best {view.errors[best]:.4f} at {best:,}"
        made.append(("held out", f"{view.errors[newest]:.4f} at {newest:,}{best_told}"))
    if view.waits_for is None:
        waited = f"data wait {format_share(line['wait_share'])}"
        speed = f"{format_rate(line['samples_per_s'], 'samples')}, {format_seconds(line['step_s'])} a step"
        made += [("speed", f"{speed}, {waited}"), ("held up by", interval_verdict(line))]
    made.append(("store", _store(line["object_store_bytes"], view.store_bytes)))
    return made


def _bar(view: View, width: int, glyphs: str) -> str:
    told = f"step {view.step:,} of {view.total_steps:,} "
    share = view.step / view.total_steps
    room = max(0, min(width, DRAWN_CHARS) - LABEL_CHARS - len(told) - 6)
    done = int(room * share)
    return f"{told}{glyphs[0] * done}{glyphs[1] * (room - done)} {share:4.0%}"


def sparkline(values: Sequence[float], width: int, sparks: str = SPARKS) -> str:
    """Means of at most `width` stretches of the values, by their logarithm where all are above 0.

    >>> sparkline([8.0, 4.0, 2.0, 1.0], 4)
    '█▅▃▁'
    """
    count = min(width, len(values))
    ends = [len(values) * place // count for place in range(count + 1)] if count else []
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(ends)]
    heights = [math.log(mean) for mean in means] if all(mean > 0 for mean in means) else means
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    span = (high - low) or 1.0
    return "".join(sparks[int((height - low) / span * (len(sparks) - 1))] for height in heights)


def _hardest(by_task: Mapping[str, float | None]) -> str:
    """The task of the highest loss; its name is a dataset's."""
    known = {name: loss for name, loss in by_task.items() if loss is not None}
    if len(known) < 2:
        return ""
    name = max(known, key=lambda one: known[one])
    return f"{known[name]:.4f}  {printable(redacted(name))}"


def _store(used_bytes: float, capacity_bytes: int | None) -> str:
    if not capacity_bytes:
        return format_bytes(used_bytes)
    return f"{format_bytes(used_bytes)} of {format_bytes(capacity_bytes)}, {format_share(used_bytes / capacity_bytes)}"


def _times(view: View) -> str:
    to_go = "" if view.to_go_s is None else f", about {_whole_seconds(view.to_go_s)} to go"
    restarts = f"; {plural(view.restarts, 'restart')}" if view.restarts else ""
    return f"{_whole_seconds(view.elapsed_s)} gone{to_go}{restarts}"


def _whole_seconds(seconds: float) -> str:
    """A clock that is drawn again and again does not show tenths."""
    return format_seconds(round(seconds)).replace(".0 s", " s")


def _saved(view: View) -> str:
    if view.checkpoints is None:
        return "checkpoints elsewhere"
    newest = f", the newest of step {max(view.checkpoints):,}" if view.checkpoints else ""
    return f"{plural(len(view.checkpoints), 'checkpoint')}{newest}"


def what_starts(states: "Sequence[RankState]", num_workers: int, first_line: int) -> str:
    """What an attempt waits for before its first line, by what is heard of the workers."""
    if not states:
        return f"{plural(num_workers, 'worker')}: Ray starts them, imports take most of it"
    if any(state.moves == 0 for state in states):
        return "the model to be loaded, the first batch to be read"
    return f"step {first_line:,}, whose line is the first"


def to_renderable(view: View, width: int, *, plain: bool = False) -> Any:
    """For rich; markup in names is text."""
    from rich.text import Text

    drawn = Text(no_wrap=True, overflow="crop", end="")
    for number, (what, text) in enumerate(lines(view, width, plain=plain)):
        drawn.append("\n" if number else "")
        drawn.append(f"{what:<{LABEL_CHARS}}", "bold" if number == 0 else "dim")
        drawn.append(text, "yellow" if what == "held up by" and not text.startswith("nothing") else "")
    return drawn


class Progress:
    """Follows a run until closed, through all its attempts."""

    def __init__(self, folder: RunFolder, config: RunConfig, *, store_bytes: int | None = None) -> None:
        self._folder, self._config, self._store_bytes = folder, config, store_bytes
        self._began_s = time.monotonic()
        self._metrics = JsonlTail(folder.metrics, from_end=True)
        self._validations = JsonlTail(folder.validations)
        self._newest: dict[str, Any] = {}
        self._recent: list[dict[str, Any]] = []
        """Newest lines of this attempt."""
        self._came_s = 0.0
        self._losses: list[tuple[int, float]] = []
        self._errors: dict[int, float] = {}
        self._group: Group | None = None
        self._from_step = self._restarts = self._shown = self._last_due = 0
        self._screen = _open_screen()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._thread.start()

    def begin(self, group: Group, *, from_step: int, restarts: int) -> None:
        """An attempt begins: its steps are those after `from_step`."""
        if not restarts:
            self._shown = from_step
            self._losses = _losses_until(from_step, self._folder) if self._screen else []
        self._errors = {step: error for step, error in self._errors.items() if step <= from_step}
        self._group, self._from_step, self._restarts, self._recent = group, from_step, restarts, []

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._look_guarded()
        if self._screen is not None:
            self._end_screen()
            with contextlib.suppress(OSError):  # a terminal that is gone
                self._say_end()

    def view(self) -> View:
        """Of this moment."""
        return View(
            name=printable(redacted(self._config.job_name)),
            total_steps=self._config.steps,
            elapsed_s=time.monotonic() - self._began_s,
            step=self._recent[-1]["optimizer_step"] if self._recent else self._from_step,
            waits_for=None if self._recent else self._waits_for(),
            newest=self._newest,
            to_go_s=self._to_go_s(),
            losses=[loss for _, loss in self._losses],
            errors=dict(self._errors),
            restarts=self._restarts,
            checkpoints=None if self._config.storage_path else LocalStore(self._folder.path / CHECKPOINTS).steps(),
            store_bytes=self._store_bytes,
        )

    def _waits_for(self) -> str:
        every, states = self._config.log_freq, self._group.states if self._group else ()
        first_line = min(self._config.steps, (self._from_step // every + 1) * every)
        return what_starts(states, self._config.num_workers, first_line)

    def _follow(self) -> None:
        while not self._stop.wait(POLL_S):
            self._look_guarded()

    def _look_guarded(self) -> None:
        """A view that breaks goes, and plain lines come in its place; where those break, too, nothing is shown."""
        try:
            self._look()
        except Exception as error:
            was_drawn = self._screen is not None
            self._end_screen()
            self._screen = None
            if was_drawn:
                with contextlib.suppress(OSError):
                    warn(f"vlatune: warning: the view of the run broke ({error}); plain lines from here on")

    def _look(self) -> None:
        new = self._metrics.read_new()
        self._errors |= {one["optimizer_step"]: one["val_action_error"] for one in self._validations.read_new()}
        for line in new:
            self._take(line)
        if self._screen is not None:
            console = self._screen.console
            width, is_plain = min(MOST_CHARS, console.width - 1), not console.encoding.lower().startswith("utf")
            self._screen.update(to_renderable(self.view(), width, plain=is_plain), refresh=True)

    def _take(self, line: dict[str, Any]) -> None:
        step = line["optimizer_step"]
        while self._losses and self._losses[-1][0] >= step:  # a restart makes them again
            self._losses.pop()
        self._losses.append((step, line["loss"]))
        if step > self._from_step:
            self._newest, self._came_s = line, time.monotonic()
            self._recent = [*self._recent, line][-ETA_LINES:]
        if step > self._shown:
            self._shown = step
            if self._screen is None and (step == self._config.steps or self._is_due(step)):
                say(self._told(line))

    def _told(self, line: Mapping[str, Any]) -> str:
        newest = self._errors[max(self._errors)] if self._errors else None
        return f"step {line['optimizer_step']}/{self._config.steps}  {describe(line, newest)}"

    def _is_due(self, step: int) -> bool:
        """About twenty plain lines for a whole run."""
        every = max(1, self._config.steps // 20)
        before, self._last_due = self._last_due, step // every
        return self._last_due > before

    def _to_go_s(self) -> float | None:
        if not self._recent:
            return None
        step_s = sum(line["step_s"] for line in self._recent) / len(self._recent)
        left_s = (self._config.steps - self._recent[-1]["optimizer_step"]) * step_s
        return max(0.0, left_s - (time.monotonic() - self._came_s))

    def _say_end(self) -> None:
        """What stays of a view: plain, and to be copied."""
        if self._recent:
            view = self.view()
            best = f"; best held out {min(view.errors.values()):.4f}" if view.errors else ""
            say(self._told(self._recent[-1]))
            say(f"{format_seconds(view.elapsed_s)}{best}; {_saved(view)}; {plural(view.restarts, 'restart')}")

    def _end_screen(self) -> None:
        if self._screen is not None:
            with contextlib.suppress(Exception):
                self._screen.stop()


def _open_screen() -> Any:
    """None where there is no terminal, or one that cannot move its cursor."""
    if not sys.stdout.isatty():
        return None
    screen = make_view(sys.stdout)
    if screen.console.is_dumb_terminal:
        return None
    screen.start()
    return screen


def _losses_until(step: int, folder: RunFolder) -> list[tuple[int, float]]:
    """Of the steps that a run goes on from."""
    lines = read_jsonl(folder.metrics) if folder.metrics.exists() else []
    return [(line["optimizer_step"], line["loss"]) for line in lines if line["optimizer_step"] <= step]
