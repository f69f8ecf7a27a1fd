"""What a check of `vlatune doctor` finds, the remedy as it is typed, and the case that the checks share.

A remedy is flags to add to the command, or a command for the shell, or both; neither is shown before it could be built from
what was found. A check that fails and whose flags mend it hands the mended config on (`Case.amend`), so that those after it
look at the rest instead of failing for the same reason.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vlatune.batch import Columns
from vlatune.config import RunConfig
from vlatune.flags import flags_of, parse_flags, typed

if TYPE_CHECKING:
    from vlatune.dataset.meta.dataset_meta import DatasetMeta
    from vlatune.dataset.reader import ReadSpec
    from vlatune.doctor.device_memory import Footprint
    from vlatune.policies.base import Binding, PolicyAdapter, PolicySpec
    from vlatune.run_setup import Setup, Usable

type Status = Literal["pass", "warn", "fail", "skipped"]
STATUSES: tuple[Status, ...] = ("pass", "skipped", "warn", "fail")
"""From the best to the worst."""
EDIT_JSON = (
    "import json,sys,functools as t; f,*e=sys.argv[1:]; d=json.load(open(f)); "
    '[t.reduce(lambda o,k:o[k],p,d).__setitem__(k,v) for *p,k,v in map(json.loads,e)]; json.dump(d,open(f,"w"),indent=4)'
)
"""Sets values in a JSON file, by any Python 3: python3 -c ... FILE '["key", "inner key", value]' ..."""
DIVIDE = (
    "import json,sys; f,*k=sys.argv[1:]; d=json.load(open(f)); g=lambda v:[g(x) for x in v] if isinstance(v,list) else v/255; "
    '[d[c].update({n:g(v) for n,v in d[c].items() if n!="count"}) for c in k]; json.dump(d,open(f,"w"),indent=4)'
)


@dataclass(frozen=True)
class Finding:
    status: Status
    text: str
    """What was found, with its figure."""
    remedy: str = ""
    """What to do, in words."""
    flags: tuple[str, ...] = ()
    """To add to the command; a flag that is there already is replaced."""
    command: str = ""
    """To run in a shell before."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The numbers, for machines."""
    amended: bool = False
    """Whether the checks after it were made as with its flags."""
    check: str = ""
    """Name of the check; set by whoever runs it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "status": self.status,
            "text": self.text,
            "remedy": self.remedy,
            "flags": typed(self.flags),
            "command": self.command,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True)
class Prompt:
    text: str
    tokens: int
    """Before anything is cut off."""


@dataclass(frozen=True)
class FirstBatch:
    """The first micro-batch of rank 0, or its first rows, as training gets it."""

    rows: Columns
    """As the reader delivers them: pictures at the policy's size, values as recorded."""
    seen: Columns
    """As the module takes them."""
    prompts: tuple[Prompt, ...]
    """None where the policy has no prompt."""


@dataclass
class Case:
    """What the checks know so far. A check that sets a part is named by all that use it (`examine.py`)."""

    config: RunConfig
    """As given, with the flags of remedies that were needed to go on."""
    scratch: Path
    """A temporary folder."""
    base_path: str = ""
    metas: "tuple[DatasetMeta, ...]" = ()
    folder: Path = field(init=False)
    """Of the base model."""
    adapter: "PolicyAdapter[Any]" = field(init=False)
    policy: "PolicySpec" = field(init=False)
    bindings: "list[Binding]" = field(init=False)
    binding: "Binding" = field(init=False)
    specs: "tuple[ReadSpec, ...]" = field(init=False)
    usable: "Usable" = field(init=False)
    stats: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    setup: "Setup" = field(init=False)
    batch: FirstBatch = field(init=False)
    module: Any = None
    """The torch module, where it was loaded."""
    seen_range: tuple[float, float] | None = None
    """Of pictures at the entry of the module's first convolution."""
    step_s: float | None = None
    """Of a micro-step of the first batch, where one was run."""
    footprint: "Footprint | None" = None
    """Device memory of the run's own way to train."""

    def amend(self, flags: Sequence[str]) -> None:
        self.config = amended(self.config, flags)

    def run_config(self) -> RunConfig:
        """With the base model that was found or made."""
        return replace(self.config, policy=replace(self.config.policy, path=self.base_path))


def amended(config: RunConfig, flags: Sequence[str]) -> RunConfig:
    """As the same command with these flags more would be understood."""
    names = {_flag_name(word) for word in flags}
    return parse_flags([*(word for word in flags_of(config) if _flag_name(word) not in names), *flags], RunConfig)


def _flag_name(word: str) -> str:
    return word.partition("=")[0]


def map_flag(names: Mapping[str, str], flag: str = "--rename_map") -> str:
    """A map of names as one word of a command line."""
    return f"{flag}={json.dumps(dict(names))}"


def edit_json_command(file: Path | str, edits: Iterable[Sequence[Any]]) -> str:
    """A shell command that sets values in a JSON file; an edit is the way to a value, and the value."""
    words = ["python3", "-c", EDIT_JSON, str(file), *(json.dumps(list(edit)) for edit in edits)]
    return shlex.join(words)


def divide_stats_command(file: Path | str, features: Iterable[str]) -> str:
    """A shell command that brings statistics of pictures from 0..255 to 0..1."""
    return shlex.join(["python3", "-c", DIVIDE, str(file), *features])


def refused(error: Exception, *, flags: Sequence[str] = (), command: str = "") -> Finding:
    """An error as a finding: our messages say what was found, then after a semicolon what to do."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, ValueError | RuntimeError):
        text = f"{type(error).__name__}: {text}"
    found, _, remedy = text.partition("; ")
    return Finding("fail", found, remedy, tuple(flags), command)


def worst(findings: Iterable[Finding]) -> Status:
    return STATUSES[max((STATUSES.index(one.status) for one in findings), default=0)]
