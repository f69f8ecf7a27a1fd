"""`vlatune doctor`: every check of a run, one after the other, without starting it.

All of `vlatune train`'s flags, understood by the same parser. A check that fails does not end the others: those that need
what it was to find out say so, and where its own flags mend it they go on with them. Nothing is written but the page, in a
folder of its own: the run's is left as it is, so that `train` finds nothing there.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.config import RunConfig
from vlatune.console import redacted
from vlatune.doctor import batch_checks, data_checks, feature_checks, machine_checks, model_checks
from vlatune.doctor.findings import Case, Finding, Status, amended, refused, worst
from vlatune.flags import flags_of, typed


@dataclass(frozen=True)
class Check:
    name: str
    call: Callable[[Case], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    """Checks without which this one has nothing to look at."""


CHECKS = (
    Check("settings", data_checks.check_settings),
    Check("dataset", data_checks.check_datasets, ("settings",)),
    Check("fps", data_checks.check_fps, ("dataset",)),
    Check("files", data_checks.check_files, ("dataset",)),
    Check("features", feature_checks.check_names, ("dataset",)),
    Check("base", model_checks.check_base, ("features",)),
    Check("dims", feature_checks.check_dims, ("base",)),
    Check("cameras", feature_checks.check_cameras, ("base",)),
    Check("horizon", model_checks.check_horizon, ("base",)),
    Check("episodes", data_checks.check_episodes, ("dims", "cameras")),
    Check("statistics", data_checks.check_statistics, ("episodes",)),
    Check("values", data_checks.check_values, ("statistics",)),
    Check("samples", data_checks.check_samples, ("statistics", "values")),
    Check("roots", feature_checks.check_roots, ("episodes",)),
    Check("first batch", batch_checks.check_batch, ("samples",)),
    Check("prompts", batch_checks.check_prompts, ("first batch",)),
    Check("weights", model_checks.check_weights, ("samples",)),
    Check("trainable", model_checks.check_trainable, ("weights",)),
    Check("loss", model_checks.check_loss, ("weights", "first batch")),
    Check("pictures", batch_checks.check_pictures, ("first batch",)),
    Check("memory", machine_checks.check_memory, ("first batch",)),
    Check("shuffle", machine_checks.check_shuffle, ("samples",)),
    Check("reading", machine_checks.check_reading, ("first batch",)),
    Check("storage", machine_checks.check_storage, ("settings",)),
    Check("credentials", machine_checks.check_credentials, ("dataset", "base")),
    Check("cluster", machine_checks.check_cluster, ("samples",)),
)
"""In the order in which they are made: what costs nothing first."""


@dataclass(frozen=True)
class Examination:
    """What was found, and the command that would mend it."""

    findings: tuple[Finding, ...]
    case: Case
    given: RunConfig

    @property
    def status(self) -> Status:
        return worst(self.findings)

    @property
    def command(self) -> str:
        """The run with all flags of remedies in it, as it is typed."""
        config = self.given
        for one in self.findings:
            config = amended(config, one.flags) if one.status in ("warn", "fail") and one.flags else config
        return redacted(f"vlatune train {typed(flags_of(config))}")

    def counts(self) -> dict[str, int]:
        found = [one.status for one in self.findings]
        return {status: found.count(status) for status in ("fail", "warn", "skipped", "pass")}

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "counts": self.counts(),
            "findings": [one.to_json() for one in self.findings],
            "command": self.command,
        }


def examine(
    config: RunConfig, scratch: Path, *, on_check: Callable[[int, int], None] = lambda done, total: None
) -> Examination:
    """Make all checks; `scratch` is a folder for what a run would make for itself, a small base model for example."""
    case = Case(config=config, scratch=scratch)
    findings: list[Finding] = []
    lost: dict[str, str] = {}
    with _kept_threads():
        for number, check in enumerate(CHECKS):
            findings += [_named(one, check.name) for one in run_check(check, case, lost)]
            on_check(number + 1, len(CHECKS))
    return Examination(tuple(findings), case, config)


@contextmanager
def _kept_threads() -> Iterator[None]:
    """A caller that uses torch finds it as it was."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else None
    yield
    if torch and before:
        torch.set_num_threads(before)


def _named(one: Finding, name: str) -> Finding:
    """With its check's name, and without secrets: it goes to the terminal, to a page and to machines."""
    texts = {part: redacted(getattr(one, part)) for part in ("text", "remedy", "command")}
    return replace(one, check=name, **texts)


def run_check(check: Check, case: Case, lost: dict[str, str]) -> list[Finding]:
    """Its findings; `lost` gets the check if others that need it cannot be made, with the reason."""
    reasons = [lost[name] for name in check.needs if name in lost]
    if reasons:
        lost[check.name] = reasons[0]
        return [Finding("skipped", f"not checked because {reasons[0]}")]
    found: list[Finding] = []
    try:
        found.extend(check.call(case))  # what it found before it broke off stays
    except Exception as error:  # a check that cannot be made must not end the others
        found.append(refused(error))
    status = worst(one for one in found if not one.amended)
    if status == "fail":
        lost[check.name] = f"'{check.name}' failed"
    elif status == "skipped":
        lost[check.name] = f"'{check.name}' was not checked"
    return found
