"""What a checkpoint holds: the tensors that train, the optimizer's, and a page of JSON. safetensors only, no pickle.

The order of samples and the noise are pure functions of (seed, step), so the place in the data is one number and
there is no generator whose state could be lost.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TRAINABLE = "trainable.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
FORMAT = 1


@dataclass(frozen=True)
class TrainState:
    """The numbers beside the tensors."""

    optimizer_step: int
    lanes: int
    """The order's number of lanes, which stays with the run."""
    loss_sum: float
    loss_count: int
    """Losses since the last line of metrics.jsonl, so that the next line is the same after a restart."""
    fingerprints: Mapping[str, str]
    """What the run was made of: hashes of config, dataset and base model, and versions."""
    format: int = FORMAT


def write_state(
    folder: Path, state: TrainState, trainable: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    save_file({name: value.detach().contiguous() for name, value in trainable.items()}, folder / TRAINABLE)
    save_file(_optimizer_tensors(list(trainable), optimizer), folder / OPTIMIZER)
    (folder / STATE).write_text(json.dumps(asdict(state), indent=2))


def read_state(folder: Path) -> TrainState:
    raw: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    if raw.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {folder}: format {raw.get('format')}, this version reads {FORMAT}; use the version that wrote it"
        )
    return TrainState(**raw)


def load_trainable(folder: Path, trainable: Mapping[str, Tensor]) -> None:
    """Copy the stored tensors into the model's; names and shapes must be the same."""
    stored = load_file(folder / TRAINABLE)
    if stored.keys() != trainable.keys():
        odd = sorted(stored.keys() ^ trainable.keys())
        raise ValueError(
            f"checkpoint {folder}: it trains other parameters than this run ({odd[0]} and {len(odd) - 1} more differ); is --policy.train another?"
        )
    with torch.no_grad():
        for name, value in stored.items():
            trainable[name].copy_(value)


def load_optimizer(folder: Path, names: list[str], optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its stored moments and step counts, parameter by parameter in the order of `names`."""
    stored = load_file(folder / OPTIMIZER)
    per_parameter: dict[int, dict[str, Tensor]] = {}
    for position, name in enumerate(names):
        prefix = f"{name}|"
        per_parameter[position] = {key.removeprefix(prefix): v for key, v in stored.items() if key.startswith(prefix)}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": per_parameter, "param_groups": groups})


def _optimizer_tensors(names: list[str], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`name|exp_avg` -> tensor; `|` is in no parameter's name."""
    state = optimizer.state_dict()["state"]
    return {
        f"{names[position]}|{key}": value.detach().contiguous()
        for position, values in state.items()
        for key, value in values.items()
    }
