"""What `vlatune doctor` found, for people: lines for the terminal, and a page with the first batch as the model sees it.

The page is in the report's style and needs nothing else. All text goes through `formatting.tag`, which escapes it, and all that
is printed through `console.say`: names and sentences come from datasets of strangers.
"""

import os
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vlatune.batch import ACTION, ACTION_IS_PAD, TASK, num_rows
from vlatune.config import DoctorConfig
from vlatune.console import printable
from vlatune.doctor.device_memory import GPU_SIZES
from vlatune.doctor.examine import Examination, examine
from vlatune.doctor.findings import Case, Finding, FirstBatch
from vlatune.files import write_text
from vlatune.flags import typed
from vlatune.report import plots
from vlatune.report.chart import Chart, Line, draw, legend, scale_of, span_of
from vlatune.report.formatting import Html, join, plural, shorten, tag
from vlatune.report.page import command, make_page, row, section, table

MAX_SAMPLES, MAX_DIMS = 6, 8
"""Cards on the page, and dims of the action on each."""
MAX_TEXT, MAX_PROMPT = 600, 1200
NAME_COLUMN = 14
TONES = {"pass": "good", "warn": "warn", "fail": "bad", "skipped": "muted"}
STYLE = """
.checks { border-collapse: collapse; } .checks td, .checks th { border-top: 1px solid var(--line); padding: .5rem .8rem .5rem 0; vertical-align: top; overflow-wrap: anywhere; }
.checks th { width: 7rem; font-weight: 550; } .checks .state { width: 5.2rem; }
.badge { display: inline-block; min-width: 4rem; text-align: center; border-radius: .35rem; padding: .05rem .5rem; font-size: .8rem; font-weight: 600; }
.badge.good { color: var(--good); background: var(--good-bg); } .badge.warn { color: var(--warn); background: var(--warn-bg); }
.badge.bad { color: var(--bad); background: var(--bad-bg); } .badge.muted { color: var(--muted); background: var(--soft); }
.todo { color: var(--muted); margin: .3rem 0 0; } .checks .command { margin: .4rem 0 .2rem; } .checks td p { margin: 0; max-width: none; }
pre { background: var(--soft); border-radius: .4rem; padding: .5rem .7rem; margin: .4rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .82rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.sizes td, .sizes th { border-top: 1px solid var(--line); padding: .35rem .8rem .35rem 0; }
.scale { font-size: .8rem; font-weight: 600; margin: .2rem 0 .3rem; color: var(--muted); grid-column: 1 / -1; }
@media (max-width: 46rem) {
  .checks, .checks tbody, .checks tr, .checks td, .checks th { display: block; width: auto; border: 0; padding: 0; }
  .checks tr { border-top: 1px solid var(--line); padding: .6rem 0; position: relative; } .checks .state { position: absolute; right: 0; top: .6rem; width: auto; }
  .checks th { margin-bottom: .25rem; } .sizes { min-width: 30rem; }
}
"""


def run_doctor(
    options: DoctorConfig, *, on_check: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Examination, Path | None]:
    """The examination, and the page where it could be written."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as a run has it, before torch is loaded
    with tempfile.TemporaryDirectory(prefix="vlatune-doctor-") as scratch:
        found = examine(options.run(), Path(scratch), on_check=on_check)
        try:
            return found, write_page(options.page, found)
        except OSError as error:
            page = Finding(
                "warn",
                f"the page cannot be written to '{options.page}' ({error.strerror})",
                "give a file with --html",
                check="page",
            )
            return replace(found, findings=(*found.findings, page)), None


def doctor_text(found: Examination, page: Path | None, *, width: int) -> str:
    """A line or more for every finding, then what to do."""
    lines = [line for one in found.findings for line in _finding_lines(one, width)]
    lines += ["", f"{_verdict(found)}"]
    if any(one.flags for one in found.findings if one.status in ("warn", "fail")):
        lines += ["with all flags that were named:", f"  {found.command}"]
    if page is not None:
        lines.append(f"the first batch as the model sees it: {page}")
    return "\n".join(lines)


def _finding_lines(one: Finding, width: int) -> Iterator[str]:
    head = f"{'skip' if one.status == 'skipped' else one.status:5}{one.check:{NAME_COLUMN}}"
    indent = " " * len(head)
    yield from _wrapped(one.text, width, first=head, rest=indent)
    if one.status not in ("warn", "fail"):
        return
    if one.remedy:
        yield from _wrapped(f"{one.remedy}{':' if one.flags or one.command else ''}", width, first=indent, rest=indent)
    for text in (one.command, typed(one.flags)):
        if text:  # in one line, to be copied
            yield f"{indent}  {printable(text)}"


def _wrapped(text: str, width: int, *, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        max(width, 60),
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _verdict(found: Examination) -> str:
    counts = found.counts()
    if found.status == "fail":
        return f"{plural(counts['fail'], 'failure')}, {plural(counts['warn'], 'warning')}: this run would fail, or learn something else than was recorded"
    if found.status == "warn":
        return f"no failures, {plural(counts['warn'], 'warning')}"
    return f"all {counts['pass']} passed{', ' + str(counts['skipped']) + ' not checked' if counts['skipped'] else ''}"


def write_page(path: Path, found: Examination) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, doctor_page(found))
    return path


def doctor_page(found: Examination) -> str:
    case = found.case
    body = [tag("style", Html(STYLE)), _head(found), _checks(found.findings), _command(found)]
    batch: FirstBatch | None = getattr(case, "batch", None)
    body.append(
        _first_batch(case, batch) if batch else section("The first batch", tag("p", _no_batch(found), class_="missing"))
    )
    body.append(_memory(found.findings))
    return make_page(f"{found.given.job_name} · vlatune doctor", join(body))


def _no_batch(found: Examination) -> str:
    why = next((one.text for one in found.findings if one.check == "first batch"), "it was not read")
    return f"Not shown: {why}."


def _head(found: Examination) -> Html:
    roots = found.given.dataset.root or (found.given.dataset.repo_id or "",)
    about = [
        "vlatune doctor",
        found.given.policy.type,
        found.given.policy.train,
        *(one.rstrip("/").split("/")[-1] for one in roots),
    ]
    return tag(
        "header",
        tag("p", shorten(" · ".join(about), MAX_TEXT), class_="eyebrow"),
        tag("h1", shorten(found.given.job_name, 200)),
        tag("p", _verdict(found), class_=f"verdict {TONES[found.status] if found.status != 'skipped' else 'good'}"),
    )


def _checks(findings: Sequence[Finding]) -> Html:
    rows = []
    for one in findings:
        parts: list[str] = [tag("p", shorten(one.text, MAX_TEXT))]
        if one.status in ("warn", "fail"):
            parts += [tag("p", shorten(one.remedy, MAX_TEXT), class_="todo")] if one.remedy else []
            parts += [_copyable(text) for text in (one.command, typed(one.flags)) if text]
        badge = tag(
            "span", "not checked" if one.status == "skipped" else one.status, class_=f"badge {TONES[one.status]}"
        )
        rows.append(tag("tr", tag("th", one.check, scope="row"), tag("td", badge, class_="state"), tag("td", *parts)))
    return section("Checks", tag("table", tag("tbody", *rows), class_="checks"))


def _command(found: Examination) -> Html:
    flags = any(one.flags for one in found.findings if one.status in ("warn", "fail"))
    what = "With all flags that were named:" if flags else "The run, as it was given:"
    return section("Command", tag("p", what), _copyable(found.command))


def _copyable(text: str) -> Html:
    return command(text.split(" "))


def _first_batch(case: Case, batch: FirstBatch) -> Html:
    shown = min(MAX_SAMPLES, num_rows(batch.rows))
    height, width = case.policy.image_hw
    text = (
        f"The first {shown} samples of worker 0, as training gets them: pictures at {height} x {width} after resizing, the prompt with its tokens, "
        f"the chunk of {case.policy.horizon} actions as recorded and on the policy's scale."
    )
    keys = legend((("action", "main"), ("past the episode's end", "shade")))
    return section(
        "The first batch, as the model sees it",
        tag("p", text),
        keys,
        *(_card(case, batch, row) for row in range(shown)),
    )


def _card(case: Case, batch: FirstBatch, row: int) -> Html:
    place = f"episode {int(batch.rows['episode_index'][row])}, frame {int(batch.rows['frame_index'][row])}"
    if len(case.metas) > 1:
        place = f"dataset {int(batch.rows['dataset_index'][row])}, {place}"
    pictures = []
    for own, name in case.binding.cameras:
        image = batch.rows[own][row]
        image = image[-1] if image.ndim == 4 else image
        ours, theirs = (one.split(".")[-1] for one in (own, name))
        caption = ours if own == name else f"{ours} as {theirs}"
        pictures.append(
            tag(
                "figure",
                plots.picture(image, alt=shorten(f"{own}, {place}", 100)),
                tag("figcaption", shorten(caption, 100)),
            )
        )
    said: list[Html] = [tag("p", place, class_="muted")]
    if batch.prompts:
        prompt = batch.prompts[row]
        said = [
            tag("pre", shorten(prompt.text, MAX_PROMPT), dir="auto"),
            tag("p", f"{plural(prompt.tokens, 'token')}; {place}", class_="muted"),
        ]
    elif str(batch.rows[TASK][row]).strip():
        said.insert(0, tag("blockquote", shorten(str(batch.rows[TASK][row]), MAX_TEXT), dir="auto"))
    saw = tag("div", tag("div", *pictures, class_="cameras"), *said, class_="saw")
    return tag("article", saw, tag("div", *_action_plots(case, batch, row), class_="dims"), class_="card")


def _action_plots(case: Case, batch: FirstBatch, row: int) -> Iterator[Html]:
    raw_TA, seen_TP = batch.rows[ACTION][row], batch.seen[ACTION][row]
    is_pad_T = batch.rows[ACTION_IS_PAD][row]
    dims = min(raw_TA.shape[-1], MAX_DIMS)
    names = [shorten(name, 60) for name in case.binding.action_names] or [f"action {dim}" for dim in range(dims)]
    rest = f", the first {dims} of {raw_TA.shape[-1]} dims" if raw_TA.shape[-1] > dims else ""
    for title, values_TA in (("as recorded", raw_TA), ("normalised", seen_TP)):
        yield tag("p", f"Actions {title}{rest}", class_="scale")
        for dim in range(dims):
            yield draw(_action_chart(names[dim], values_TA[:, dim], is_pad_T))


def _action_chart(name: str, values_T: np.ndarray, is_pad_T: np.ndarray) -> Chart:
    ahead, valid = np.arange(len(values_T), dtype=np.float64), int((~is_pad_T).sum())
    return Chart(
        name,
        (Line("action", ahead, values_T.astype(np.float64)),),
        span_of(ahead),
        scale_of(values_T),
        x_name="actions ahead",
        height_px=70,
        y_ticks=2,
        x_ticks=2,
        keys=False,
        shade_from=max(valid - 1, 0) if valid < len(ahead) else None,
    )


def _memory(findings: Iterable[Finding]) -> Html:
    rows = next((one.figures.get("table") for one in findings if one.check == "memory"), None)
    if not rows:
        return Html("")
    heads = ["what trains", "weights and optimizer", "each sample", *(f"{size} GB: batch" for size in GPU_SIZES)]
    text = "Memory of a GPU that each way to train would need with this base model, and the largest batch for a worker that fits. Counted, not run."
    return section("What fits which GPU", tag("p", text), table(heads, (row(*cells) for cells in rows), kind="sizes"))
