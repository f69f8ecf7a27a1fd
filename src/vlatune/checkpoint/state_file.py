"""The JSON state of a checkpoint: progress, config and fingerprints. Readable without torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vlatune.batch import ACTION
from vlatune.batch import STATE as STATE_KEY
from vlatune.checkpoint.store import Store
from vlatune.policies.base import Binding, PolicySpec
from vlatune.policies.binding import check_stored
from vlatune.storage.files import parse_json
from vlatune.storage.json_types import checked
from vlatune.storage.limits import limit

STATE = "state.json"
FORMAT = 2
REMEDY = "restore the checkpoint, or remove it"
BASE_WEIGHTS = "base.weights"
"""Fingerprint that identifies the base model of a checkpoint."""


@dataclass(frozen=True)
class TrainState:
    """The state of a run besides tensors."""

    optimizer_step: int
    epoch: int
    epoch_samples: int
    """Samples of this epoch already used; with `lanes` and the seed, the position in the data."""
    samples_seen: int
    """Samples since the start of the run, over all epochs."""
    lanes: int
    """Number of lanes of the sample order, fixed for the run."""
    loss_sums: tuple[float, ...]
    """Loss sums of each rank since the last line of metrics.jsonl."""
    loss_count: int
    """Optimizer steps since that line."""
    config: dict[str, Any]
    """The complete run config, to report changes on resume."""
    fingerprints: dict[str, str]
    """Hashes of dataset and base model, and versions."""
    binding: Binding
    """The policy's inputs matched with the dataset's features, for exports."""
    format: int = FORMAT

    @property
    def num_workers(self) -> int:
        return len(self.loss_sums)

    def loss_sum(self, rank: int, num_workers: int) -> float:
        """Return the rank's own sum, or the mean if the number of workers changed."""
        if num_workers == self.num_workers:
            return self.loss_sums[rank]
        return sum(self.loss_sums) / self.num_workers


def state_bytes(state: TrainState) -> bytes:
    return json.dumps(asdict(state), indent=2, allow_nan=False).encode()


def parse_state(data: bytes, where: str, optimizer_step: int) -> TrainState:
    """Parse and validate the state of the checkpoint of this step; `where` is for messages."""
    where = f"checkpoint {where}: {STATE}"
    raw = parse_json(data, where, remedy=REMEDY)
    if isinstance(raw, dict) and raw.get("format") != FORMAT:
        raise ValueError(f"{where}: format {raw.get('format')}, expected {FORMAT}; use the version that wrote it")
    try:
        state: TrainState = checked(raw, TrainState, where)
        valid = {
            "optimizer_step": state.optimizer_step == optimizer_step,
            "epoch": state.epoch >= 0,
            "epoch_samples": state.epoch_samples >= 0,
            "samples_seen": state.samples_seen >= 0,
            "loss_count": state.loss_count >= 0,
            "lanes": 0 < state.lanes < 2**31,
            "loss_sums": len(state.loss_sums) > 0,
            "fingerprints": BASE_WEIGHTS in state.fingerprints,
        }
        _require(valid, state, where)
        _check_binding(state.binding, f"{where}: binding")
    except ValueError as error:
        raise ValueError(f"{error}; {REMEDY}") from None
    return state


def _check_binding(binding: Binding, where: str) -> None:
    most = limit("policy_number")
    valid = {
        "state_dim": 0 < binding.state_dim <= most,
        "action_dim": 0 < binding.action_dim <= most,
        "action_names": len(binding.action_names) == binding.action_dim,
        "selected": all(
            one.key in (STATE_KEY, ACTION) and all(0 <= dim < one.recorded for dim in one.dims)
            for one in binding.selected
        ),
        "fps": binding.fps >= 0,
    }
    _require(valid, binding, where)
    for number, part in enumerate(binding.parts):
        _check_binding(part, f"{where}.parts[{number}]")


def _require(valid: Mapping[str, bool], values: object, where: str) -> None:
    for name, is_valid in valid.items():
        if not is_valid:
            raise ValueError(
                f"{where}: {name} is {str(getattr(values, name))[:60]}, which is not valid for this checkpoint"
            )


def read_state(store: Store, optimizer_step: int, policy: PolicySpec | None = None) -> TrainState:
    """Read and validate the state of a checkpoint; if `policy` is given, the binding must fit it."""
    where = store.where(optimizer_step)
    try:
        state = parse_state(store.read_bytes(optimizer_step, STATE), where, optimizer_step)
    except FileNotFoundError:
        raise ValueError(f"checkpoint {where}: {STATE} is missing; {REMEDY}") from None
    if policy is not None:
        check_stored(policy, state.binding, f"checkpoint {where}: {STATE}")
    return state
