"""RUN/summary.json as one type: what the trainer writes at a run's end, and what everybody else reads.

Reading checks every value, so that a file that was cut, edited or written by another version is named and not half
believed. Fields with a default came after the first runs; a file may lack them.
"""

import dataclasses
import json
import math
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from vlatune.errors import did_you_mean
from vlatune.files import parse_json, read_file, write_json
from vlatune.flag_values import shown

SUMMARY_FILE = "summary.json"

MAX_WHOLE = 10**18
Scalar = bool | int | float | str | None
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
NAMES |= {dict: "an object", list: "a list"}


@dataclass(frozen=True)
class Summary:
    """Rates, waits and seconds are those of the last start where a run was restarted."""

    optimizer_steps: int
    final_loss: float
    samples_per_s: float
    wait_share: float
    time_to_first_batch_s: float | None
    spilled_bytes: int
    fallback_bytes: int
    peak_object_store_bytes: int
    restarts: int
    """Worker groups that were lost."""
    finished: bool = True
    reader_restarts: int | None = None
    """How often a process that schedules reading was started again, over all workers."""
    object_store_capacity_bytes: int | None = None
    num_readers: int | None = None
    """Over all workers."""
    wait_s_by_worker: tuple[float, ...] = ()
    time_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the run by what they were spent on, and of the stages beside it; see meters.py."""
    cpu: dict[str, int | float | None] | None = None
    """Seconds of the training process by thread; see cpu_clocks.py."""
    kept_by: str | None = None
    performance_flags: dict[str, Scalar] = field(default_factory=dict)
    best_validation: dict[str, int | float] | None = None
    """Optimizer step and action error of the best validation while it trained."""
    shuffle: dict[str, int | float | dict[str, float | None]] | None = None
    """How well samples were mixed; see dataset/order/shuffle_meter.py."""
    loss_by_episode: tuple[dict[str, int | float], ...] = ()
    """`dataset`, `episode`, mean `loss` and number of `samples` of the episodes that are learnt worst, the worst first."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package -> version, as in the run's checkpoints."""
    checkpoints: tuple[int, ...] | None = None
    """Optimizer steps of those that were kept."""
    checkpoint_place: str | None = None
    """Folder or URL that they lie in."""
    num_skipped_episodes: int = 0
    skipped_episodes: tuple[dict[str, int | str], ...] = ()
    verdict: str = ""

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self), allow_nan=False))

    @classmethod
    def from_json(cls, values: Any, where: str) -> Self:
        """Refuses what `to_json` could not have written; `where` names the file."""
        if not isinstance(values, dict):
            raise ValueError(f"{where}: expected an object, found {shown(values)}")
        kinds, fields = get_type_hints(cls), {one.name: one for one in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                hint = did_you_mean(name, fields) or "; another version of vlatune wrote it: read it with that one"
                raise ValueError(f"{where}: '{shown(name)}' is not known{hint}")
        for name, one in fields.items():
            if name not in values and one.default is one.default_factory is dataclasses.MISSING:
                raise ValueError(
                    f"{where}: '{name}' is missing; restore the file, or remove it and write the report anew"
                )
        return cls(**{name: checked_value(value, kinds[name], f"{where}: '{name}'") for name, value in values.items()})


def write_summary(run_dir: Path, summary: Summary) -> None:
    write_json(run_dir / SUMMARY_FILE, summary.to_json())


def read_summary(run_dir: Path) -> Summary | None:
    """None where the run has not come to its end."""
    file = run_dir / SUMMARY_FILE
    if not file.exists():
        return None
    remedy = "restore it, or remove it and write the report anew"
    values = parse_json(read_file(run_dir, SUMMARY_FILE), f"{file}:", remedy=remedy)
    return Summary.from_json(values, str(file))


def checked_value(value: Any, kind: Any, place: str) -> Any:
    """`value` as `kind`, with JSON's lists as tuples; no other conversion but from whole numbers to floats."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return checked_value(value, _fitting(value, args), place)
    if origin is dict and isinstance(value, dict):
        return {name: checked_value(one, args[1], f"{place}: '{shown(name)}'") for name, one in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(checked_value(one, args[0], f"{place}[{number}]") for number, one in enumerate(value))
    if kind is float and type(value) is int and abs(value) < MAX_WHOLE:
        return float(value)
    if type(value) is int and abs(value) >= MAX_WHOLE:
        raise ValueError(f"{place}: expected a number of at most 18 digits, found {shown(value)}")
    if kind in NAMES and type(value) is kind and (kind is not float or math.isfinite(value)):
        return value
    expected = NAMES.get(kind) or {dict: "an object", tuple: "a list"}[origin]
    raise ValueError(f"{place}: expected {expected}, found {shown(value)}")


def _fitting(value: Any, kinds: tuple[Any, ...]) -> Any:
    """That one of the kinds which the value has; where it has none, the first, for the message."""
    plain = {dict: dict, list: tuple}.get(type(value), type(value))
    fitting = [kind for kind in kinds if (get_origin(kind) or kind) is plain]
    wider = [kind for kind in kinds if kind is float and plain is int]
    return (fitting + wider + list(kinds))[0]
