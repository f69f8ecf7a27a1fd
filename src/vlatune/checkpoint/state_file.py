"""The page of JSON in a checkpoint: where the run stands and what it was made of. Readable without torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vlatune.files import parse_json, read_file

STATE = "state.json"
FORMAT = 2


@dataclass(frozen=True)
class TrainState:
    """The numbers beside the tensors."""

    optimizer_step: int
    epoch: int
    epoch_samples: int
    """Samples of this epoch that are used up: with `lanes` and the seed, the place in the data."""
    samples_seen: int
    """Samples since the run began, over all epochs."""
    lanes: int
    """The order's number of lanes, which stays with the run."""
    loss_sums: tuple[float, ...]
    """Each rank's losses since the last line of metrics.jsonl, so that the next line is the same after a restart."""
    loss_count: int
    """Optimizer steps since that line."""
    config: Mapping[str, Any]
    """The whole run config, so that a change can be named."""
    fingerprints: Mapping[str, str]
    """Hashes of dataset and base model, and versions."""
    binding: Mapping[str, Any]
    """The policy's inputs matched with the dataset's features: what an export needs of the dataset."""
    format: int = FORMAT

    @property
    def num_workers(self) -> int:
        return len(self.loss_sums)

    def loss_sum(self, rank: int, num_workers: int) -> float:
        """What a rank goes on adding to: its own sum, or the mean where the number of workers is another."""
        if num_workers == self.num_workers:
            return self.loss_sums[rank]
        return sum(self.loss_sums) / self.num_workers


def state_bytes(state: TrainState) -> bytes:
    return json.dumps(asdict(state), indent=2, allow_nan=False).encode()


def parse_state(data: bytes, where: str) -> TrainState:
    raw: dict[str, Any] = parse_json(
        data, f"checkpoint {where}: {STATE}", remedy="restore the checkpoint, or remove it"
    )
    if not isinstance(raw, dict):
        raise ValueError(f"checkpoint {where}: {STATE} holds no object; restore the checkpoint, or remove it")
    if raw.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {where}: format {raw.get('format')}, this version reads {FORMAT}; use the version that wrote it"
        )
    names = {field.name for field in fields(TrainState)}
    raw.pop("losses_by_dataset", None)  # older ones have it; it is in a file of its own now
    if raw.keys() != names:
        odd = ", ".join(sorted(raw.keys() ^ names))
        raise ValueError(
            f"checkpoint {where}: {STATE} has not the expected fields ({odd}); use the version that wrote it"
        )
    _check_kinds(raw, where)
    raw["loss_sums"] = tuple(raw["loss_sums"])
    return TrainState(**raw)


def _check_kinds(raw: Mapping[str, Any], where: str) -> None:
    """Of the page's values; what is in the config is checked against the run's own."""
    counts = ("optimizer_step", "epoch", "epoch_samples", "samples_seen", "loss_count")
    good = {name: type(raw[name]) is int and 0 <= raw[name] < 2**63 for name in counts}
    good["lanes"] = type(raw["lanes"]) is int and 0 < raw["lanes"] < 2**31
    sums = raw["loss_sums"]
    good["loss_sums"] = isinstance(sums, list) and len(sums) > 0 and all(type(one) in (int, float) for one in sums)
    good |= {name: isinstance(raw[name], dict) for name in ("config", "fingerprints", "binding")}
    for name, is_good in good.items():
        if not is_good:
            raise ValueError(
                f"checkpoint {where}: {STATE}: {name} is {str(raw[name])[:60]}, which no run writes; restore the checkpoint, or remove it"
            )


def read_state(folder: Path) -> TrainState:
    return parse_state(read_file(folder, STATE), str(folder))
