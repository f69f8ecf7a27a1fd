"""State that the checks of `vlatune doctor` share, the early check of settings and paths, and the text of a finding.

A failed check whose flags fix the problem applies them to the config (`Case.apply`), so that later
checks do not fail for the same reason. Heavy modules are not imported here.
"""

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vlatune.batch import Columns
from vlatune.config.flags import flags_of, parse_flags, quote_flags
from vlatune.config.settings import RunConfig
from vlatune.config.validate import validate
from vlatune.console import printable
from vlatune.findings import Finding, finding_of
from vlatune.storage.paths import require_base, require_dataset, require_output

if TYPE_CHECKING:
    from vlatune.checks.device_memory import Footprint
    from vlatune.data.meta.dataset_meta import DatasetMeta
    from vlatune.data.reader import ReadSpec
    from vlatune.policies.base import Binding, PolicyAdapter, PolicySpec
    from vlatune.run_setup import Setup, Usable

MAX_SHOWN = 5
"""Maximum number of names in a text."""


class Prompt(NamedTuple):
    text: str
    tokens: int
    """Number of tokens before truncation."""


@dataclass(frozen=True)
class FirstBatch:
    """First rows of the first micro-batch of rank 0."""

    rows: Columns
    """Columns from the reader: images at the policy's size, values as recorded."""
    inputs: Columns
    """Columns after the transforms, as the module gets them."""
    prompts: tuple[Prompt, ...]
    """Prompts by row; empty if the policy has no prompt."""


@dataclass
class Case:
    """Results of the checks; a check that needs a field requires the check that sets it."""

    config: RunConfig
    """Config with the flags that fix failed findings."""
    scratch: Path
    """Temporary folder."""
    applied: set[str] = field(default_factory=set)
    """Flags that were applied to the config."""
    usd_per_hour: float | None = None
    """Price of a GPU (default: typical prices)."""
    base_path: str = ""
    metas: "tuple[DatasetMeta, ...]" = ()
    folder: Path = field(init=False)
    """Folder of the base model."""
    adapter: "PolicyAdapter[Any]" = field(init=False)
    policy: "PolicySpec" = field(init=False)
    binding: "Binding" = field(init=False)
    specs: "tuple[ReadSpec, ...]" = field(init=False)
    usable: "Usable" = field(init=False)
    setup: "Setup" = field(init=False)
    batch: FirstBatch = field(init=False)
    module: Any = None
    """The torch module if it was loaded."""
    planned: Any = None
    """The module on the meta device, if it was not loaded and the policy supports that."""
    step_s: float | None = None
    """Seconds of a micro-step on the first batch, if one was run."""
    sample_s: float | None = None
    """Seconds that a worker needs per sample, including reading, if known."""
    footprint: "Footprint | None" = None
    """Device memory of the run's fine-tuning mode."""
    on_file: Callable[[int, int], None] = lambda done, total: None
    """Callback for progress while a check reads many files."""

    def apply(self, flags: Sequence[str]) -> None:
        self.config = with_flags(self.config, flags)
        self.applied |= set(flags)

    def run_config(self) -> RunConfig:
        """Return the config with the resolved base model."""
        return replace(self.config, policy=replace(self.config.policy, path=self.base_path))


def with_flags(config: RunConfig, flags: Sequence[str]) -> RunConfig:
    """Return the config with these flags added or replaced."""
    names = {word.partition("=")[0] for word in flags}
    kept = [word for word in flags_of(config) if word.partition("=")[0] not in names]
    return parse_flags([*kept, *flags], RunConfig)


def map_flag(names: Mapping[str, str], flag: str = "--rename_map") -> str:
    """Format a rename map as one command-line argument."""
    return f"{flag}={json.dumps(dict(names))}"


def check_input(config: RunConfig) -> tuple[Finding, ...]:
    """Return findings for invalid settings and for paths that do not exist."""
    checks: list[tuple[str, Callable[[], None]]] = [("settings", lambda: validate(config))]
    checks += [("dataset", partial(require_dataset, root, argument="--dataset.root")) for root in config.dataset.root]
    if config.policy.path is not None and not (config.run_dir / Path(config.policy.path).name).is_dir():
        checks.append(("base", partial(require_base, config.policy.path)))
    resumes_here = config.resume and config.storage_path is None
    checks.append(("run", partial(require_output, config.run_dir, resumes=resumes_here)))
    found = []
    for name, call in checks:
        try:
            call()
        except ValueError as error:
            found.append(finding_of(error, name))
    return tuple(found)


def finding_lines(one: Finding, width: int, *, first: str) -> Iterator[str]:
    """Yield wrapped lines: place and text, examples, expectation, remedy; flags stay on one line."""
    indent = " " * len(first)
    yield from _wrapped(f"{one.place}: {one.text}" if one.place else one.text, width, first=first, rest=indent)
    if one.level not in ("warn", "fail"):
        return
    for example in one.examples:
        yield from _wrapped(example, width, first=f"{indent}- ", rest=f"{indent}  ")
    if one.count > len(one.examples) > 0:
        yield f"{indent}- and {one.count - len(one.examples):,} more"
    if one.expected:
        yield from _wrapped(f"expected: {one.expected}", width, first=indent, rest=f"{indent}  ")
    if one.remedy or one.flags or one.command:
        colon = ":" if one.flags or one.command else ""
        yield from _wrapped(f"to do: {one.remedy or 'add'}{colon}", width, first=indent, rest=f"{indent}  ")
    for text in (one.command, quote_flags(one.flags)):
        if text:
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
