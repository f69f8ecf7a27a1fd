"""`vlatune doctor`: run all checks of a run without starting it; text, JSON and an HTML page.

Takes the flags of `vlatune train`. If a check fails, checks that need its result are skipped,
unless its flags fix the problem; then they continue with these flags. Only the page is written,
outside of the run folder, so that `train` can start there. The page is self-contained, and
`formatting.tag` escapes all text, because names and instructions are untrusted.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import ACTION, ACTION_IS_PAD, TASK, num_rows
from vlatune.checks.case import Case, FirstBatch, check_input, finding_lines, with_flags
from vlatune.config.flags import flags_of, quote_flags
from vlatune.config.settings import DoctorConfig, RunConfig
from vlatune.console import printable, redacted
from vlatune.findings import LEVELS, Finding, Level, finding_of, worst
from vlatune.formatting import Html, join, plural, shorten, tag
from vlatune.report.chart import Chart, Line, draw, legend, scale_of
from vlatune.report.page import command, make_page, section
from vlatune.report.page import image as image_tag
from vlatune.storage.files import make_output_folder, write_text

MAX_SAMPLES, MAX_DIMS = 6, 8
"""Maximum number of samples on the page, and of action dims per sample."""
MAX_TEXT, MAX_PROMPT = 600, 1200
NAME_COLUMN = 14
TABLES = {"cost": "Time and price on a GPU, estimated", "cache": "Stored instead of computed again"}
"""Checks with a table in their figures, and its title on the page."""
TONES = {"pass": "good", "warn": "warn", "fail": "bad", "skipped": "muted"}

type OnCheck = Callable[[int, int, str], None]
"""Callback with the number of finished checks, of all checks, and the current check."""


@dataclass(frozen=True)
class Check:
    name: str
    call: Callable[[Case], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    """Checks whose results this check requires."""


def all_checks() -> tuple[Check, ...]:
    """Return all checks in order, cheapest first; imports them, which is slow."""
    from vlatune.checks import machine_checks, policy_checks, run_checks

    return (
        Check("settings", run_checks.check_settings),
        Check("run", machine_checks.check_run_folder, ("settings",)),
        Check("dataset", run_checks.check_datasets, ("settings",)),
        Check("files", run_checks.check_files, ("dataset",)),
        Check("features", run_checks.check_names, ("dataset",)),
        Check("base", policy_checks.check_base, ("features",)),
        Check("dims", run_checks.check_dims, ("base",)),
        Check("cameras", run_checks.check_cameras, ("base",)),
        Check("horizon", policy_checks.check_horizon, ("base",)),
        Check("episodes", run_checks.check_episodes, ("files", "dims", "cameras")),
        Check("samples", run_checks.check_samples, ("episodes",)),
        Check("first batch", run_checks.check_batch, ("samples",)),
        Check("prompts", run_checks.check_prompts, ("first batch",)),
        Check("weights", policy_checks.check_weights, ("samples",)),
        Check("loss", policy_checks.check_loss, ("weights", "first batch")),
        Check("images", run_checks.check_images, ("first batch",)),
        Check("memory", machine_checks.check_memory, ("first batch",)),
        Check("reading", machine_checks.check_reading, ("first batch",)),
        Check("cache", machine_checks.check_cache, ("reading",)),
        Check("duration", machine_checks.check_duration, ("reading",)),
        Check("cost", machine_checks.check_cost, ("first batch",)),
        Check("storage", machine_checks.check_storage, ("settings",)),
        Check("cluster", machine_checks.check_cluster, ("samples",)),
    )


@dataclass(frozen=True)
class Examination:
    """Findings, and the command with all remedies."""

    findings: tuple[Finding, ...]
    case: Case
    given: RunConfig

    @property
    def level(self) -> Level:
        return worst(self.findings)

    @property
    def command(self) -> str:
        """Return the command with the flags of all remedies, quoted for a shell."""
        config = self.given
        for one in self.findings:
            config = with_flags(config, one.flags) if one.level in ("warn", "fail") and one.flags else config
        return redacted(f"vlatune train {quote_flags(flags_of(config))}")

    @property
    def has_flags(self) -> bool:
        return any(one.flags for one in self.findings if one.level in ("warn", "fail"))

    @property
    def verdict(self) -> str:
        counts = self.counts()
        warnings = plural(counts["warn"], "warning")
        if self.level == "fail":
            return f"{plural(counts['fail'], 'failure')}, {warnings}: this run would fail or learn from wrong data"
        if self.level == "warn":
            return f"no failures, {warnings}"
        return f"all {counts['pass']} passed{f', {counts["skipped"]} skipped' if counts['skipped'] else ''}"

    def counts(self) -> dict[str, int]:
        return {level: sum(one.level == level for one in self.findings) for level in reversed(LEVELS)}

    def to_json(self) -> dict[str, Any]:
        findings = [one.to_json() for one in self.findings]
        return {"status": self.level, "counts": self.counts(), "findings": findings, "command": self.command}


def run_doctor(
    options: DoctorConfig,
    *,
    on_check: OnCheck = lambda done, total, name: None,
    on_finding: Callable[[Finding], None] = lambda one: None,
) -> tuple[Examination, Path | None]:
    """Run all checks, write the page, and return the findings; `on_finding` gets each at once."""
    config = options.run()
    if wrong := tuple(map(_redact, check_input(config))):
        for one in wrong:
            on_finding(one)
        return Examination(wrong, Case(config, Path()), config), None
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in a run; must be set before torch is imported
    with tempfile.TemporaryDirectory(prefix="vlatune-doctor-") as scratch:
        found = examine(config, Path(scratch), options.usd_per_hour, on_check=on_check, on_finding=on_finding)
        try:
            make_output_folder(options.page.parent)
            write_text(options.page, doctor_page(found))
            return found, options.page
        except OSError as error:
            text = f"'{options.page}' cannot be written ({error.strerror})"
            page = Finding("warn", "page", text, remedy="choose another file with --html")
            return replace(found, findings=(*found.findings, page)), None


def examine(
    config: RunConfig,
    scratch: Path,
    usd_per_hour: float | None = None,
    *,
    on_check: OnCheck = lambda done, total, name: None,
    on_finding: Callable[[Finding], None] = lambda one: None,
) -> Examination:
    """Run all checks; `scratch` is a folder for files that a run would create, such as a tiny base."""
    case, findings, checks = Case(config, scratch, usd_per_hour=usd_per_hour), [], all_checks()
    failed: dict[str, str] = {}

    def show_files(number: int, name: str, done: int, total: int) -> None:
        on_check(number, len(checks), f"{name}: {done:,} of {total:,} files")

    for number, check in enumerate(checks):
        on_check(number, len(checks), check.name)
        case.on_file = partial(show_files, number, check.name)
        for one in map(_redact, run_check(check, case, failed)):
            findings.append(one)
            on_finding(one)
    on_check(len(checks), len(checks), "")
    return Examination(tuple(findings), case, config)


def run_check(check: Check, case: Case, failed: dict[str, str]) -> list[Finding]:
    """Return the findings of a check; a failure is added to `failed` with its reason."""
    reason = next((failed[name] for name in check.needs if name in failed), None)
    if reason is not None:
        failed[check.name] = reason
        return [Finding("skipped", check.name, f"not checked because {reason}")]
    found: list[Finding] = []
    try:
        found.extend(check.call(case))  # keeps findings made before an error
    except Exception as error:  # one failing check must not end the others
        found.append(finding_of(error, check.name))
    level = worst(one for one in found if not (one.flags and case.applied.issuperset(one.flags)))
    if level == "fail":
        failed[check.name] = f"'{check.name}' failed"
    elif level == "skipped":
        failed[check.name] = f"'{check.name}' was skipped"
    return found


def _redact(one: Finding) -> Finding:
    return replace(one, **{name: redacted(getattr(one, name)) for name in ("text", "place", "remedy", "command")})


def finding_text(one: Finding, *, width: int) -> str:
    name = "skip" if one.level == "skipped" else one.level
    return "\n".join(finding_lines(one, width, first=f"{name:5}{one.check:{NAME_COLUMN}}"))


def outcome_text(found: Examination, page: Path | None, *, width: int) -> str:
    """Return the lines after the findings: skipped checks, verdict, and command."""
    lines = [finding_text(one, width=width) for one in _skipped(found.findings)]
    for table in _tables(found.findings).values():
        lines += ["", *map(printable, table)]
    lines += ["", found.verdict]
    if found.has_flags:
        lines += ["command with all these flags:", f"  {found.command}"]
    if page is not None:
        lines.append(f"the first batch as the model gets it: {page}")
    return "\n".join(lines)


def _skipped(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for all checks that were skipped for the same reason."""
    names: dict[str, list[str]] = {}
    for one in findings:
        if one.level == "skipped":
            names.setdefault(one.text, []).append(one.check)
    return [Finding("skipped", "", f"{', '.join(checks)}: {text}") for text, checks in names.items()]


def doctor_page(found: Examination) -> str:
    read = next((one for one in found.findings if one.check == "first batch"), None)
    why = read.text if read else "it was not read"
    body = [
        _head(found),
        _checks(found.findings),
        section(
            "Command",
            tag("p", "With all flags from above:" if found.has_flags else "The run as given:"),
            command(found.command.split(" ")),
        ),
        _first_batch(found.case)
        if read and read.level == "pass"
        else section("The first batch", tag("p", f"Not shown: {why}.", class_="missing")),
        *(section(title, tag("pre", "\n".join(table))) for title, table in _tables(found.findings).items()),
    ]
    return make_page(f"{found.given.job_name} · vlatune doctor", join(body))


def _head(found: Examination) -> Html:
    roots = found.given.dataset.root or (found.given.dataset.repo_id or "",)
    names = [one.rstrip("/").split("/")[-1] for one in roots]
    about = ["vlatune doctor", found.given.policy.type, found.given.policy.train, *names]
    tone = "good" if found.level == "skipped" else TONES[found.level]
    return tag(
        "header",
        tag("p", shorten(" · ".join(about), MAX_TEXT), class_="eyebrow"),
        tag("h1", shorten(found.given.job_name, 200)),
        tag("p", found.verdict, class_=f"verdict {tone}"),
    )


def _checks(findings: Sequence[Finding]) -> Html:
    rows = []
    for one in [*(one for one in findings if one.level != "skipped"), *_skipped(findings)]:
        parts: list[str] = [tag("p", shorten(f"{one.place}: {one.text}" if one.place else one.text, MAX_TEXT))]
        if one.level in ("warn", "fail"):
            if one.examples:
                parts.append(tag("ul", *(tag("li", shorten(example, MAX_TEXT)) for example in one.examples)))
            for label, text in (("Expected", one.expected), ("To do", one.remedy)):
                parts += [tag("p", shorten(f"{label}: {text}", MAX_TEXT), class_="todo")] if text else []
            parts += [command(text.split(" ")) for text in (one.command, quote_flags(one.flags)) if text]
        badge = tag("span", one.level, class_=f"badge {TONES[one.level]}")
        rows.append(tag("tr", tag("th", one.check, scope="row"), tag("td", badge, class_="state"), tag("td", *parts)))
    return section("Checks", tag("table", tag("tbody", *rows), class_="checks"))


def _first_batch(case: Case) -> Html:
    batch, shown = case.batch, min(MAX_SAMPLES, num_rows(case.batch.rows))
    height, width = case.policy.image_hw
    text = (
        f"The first {shown} samples of worker 0: images resized to {height} x {width}, the prompt with its tokens, "
        f"the chunk of {case.policy.horizon} actions as recorded and normalised."
    )
    keys = legend((("action", "main"), ("after the end of the episode", "shade")))
    samples = (_sample(case, batch, row) for row in range(shown))
    return section("The first batch, as the model gets it", tag("p", text), keys, *samples)


def _sample(case: Case, batch: FirstBatch, row: int) -> Html:
    place = f"episode {int(batch.rows['episode_index'][row])}, frame {int(batch.rows['frame_index'][row])}"
    if len(case.metas) > 1:
        place = f"dataset {int(batch.rows['dataset_index'][row])}, {place}"
    images = []
    for own, name in case.binding.cameras:
        pixels = batch.rows[own][row]
        short, target = (one.split(".")[-1] for one in (own, name))
        caption = tag("figcaption", shorten(short if own == name else f"{short} as {target}", 100))
        image = image_tag(pixels[-1] if pixels.ndim == 4 else pixels, alt=shorten(f"{own}, {place}", 100))
        images.append(tag("figure", image, caption))
    texts: list[Html] = [tag("p", place, class_="muted")]
    if batch.prompts:
        prompt = batch.prompts[row]
        texts = [
            tag("pre", shorten(prompt.text, MAX_PROMPT), dir="auto"),
            tag("p", f"{plural(prompt.tokens, 'token')}; {place}", class_="muted"),
        ]
    elif str(batch.rows[TASK][row]).strip():
        texts.insert(0, tag("blockquote", shorten(str(batch.rows[TASK][row]), MAX_TEXT), dir="auto"))
    left = tag("div", tag("div", *images, class_="cameras"), *texts, class_="saw")
    return tag("article", left, tag("div", *_action_plots(case, batch, row), class_="dims"), class_="card")


def _action_plots(case: Case, batch: FirstBatch, row: int) -> Iterator[Html]:
    raw_TA, inputs_TP = batch.rows[ACTION][row], batch.inputs[ACTION][row]
    valid = int((~batch.rows[ACTION_IS_PAD][row]).sum())
    ahead = np.arange(len(raw_TA), dtype=np.float64)
    dims = min(raw_TA.shape[-1], MAX_DIMS)
    names = [shorten(name, 60) for name in case.binding.action_names] or [f"action {dim}" for dim in range(dims)]
    rest = f", the first {dims} of {raw_TA.shape[-1]} dims" if raw_TA.shape[-1] > dims else ""
    for title, values_TA in (("as recorded", raw_TA), ("normalised", inputs_TP)):
        yield tag("p", f"Actions {title}{rest}", class_="scale")
        for dim in range(dims):
            chart = Chart(
                names[dim],
                (Line("action", ahead, values_TA[:, dim].astype(np.float64)),),
                scale_of(values_TA[:, dim]),
                x_name="actions ahead",
                height_px=70,
                y_ticks=2,
                x_ticks=2,
                keys=False,
                shade_from=max(valid - 1, 0) if valid < len(ahead) else None,
            )
            yield draw(chart)


def _tables(findings: Iterable[Finding]) -> dict[str, Sequence[str]]:
    """Return title -> lines of the tables that the checks made."""
    made = {one.check: one.figures["table"] for one in findings if "table" in one.figures}
    return {title: made[check] for check, title in TABLES.items() if check in made}
