"""The tensors of a checkpoint: what trains, its average if there is one, and the optimizer's. safetensors, no pickle."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vlatune.files import real_path

TRAINABLE = "trainable.safetensors"
EMA = "ema.safetensors"
OPTIMIZER = "optimizer.safetensors"

Tensors = Mapping[str, Tensor]


def tensors_to_save(
    trainable: Tensors, optimizer: torch.optim.Optimizer, ema: Tensors | None = None
) -> dict[str, Tensors]:
    """File name -> its tensors, still on the device."""
    files = {TRAINABLE: trainable, OPTIMIZER: _optimizer_tensors(trainable, optimizer)}
    return files | ({EMA: ema} if ema is not None else {})


def load_trainable(folder: Path, trainable: Tensors) -> None:
    """Copy the stored tensors into the model's; names and shapes must be the same."""
    _copy(folder / TRAINABLE, trainable)


def load_ema(folder: Path, ema: Tensors) -> None:
    """The same for the averages; a run whose checkpoint has none begins to average where it stands."""
    if has_ema(folder):
        _copy(folder / EMA, ema)
    else:
        _copy(folder / TRAINABLE, ema)


def load_result(folder: Path, trainable: Tensors, weights: str = "auto") -> str:
    """Into a model that is used rather than trained: `ema`, `trained`, or for `auto` the averages where there are some."""
    if weights == "ema" and not has_ema(folder):
        raise ValueError(
            f"checkpoint {folder}: it has no averaged weights; leave --weights out, or train with --optimizer.ema_decay"
        )
    file = EMA if weights != "trained" and has_ema(folder) else TRAINABLE
    _copy(folder / file, trainable)
    return "ema" if file == EMA else "trained"


def has_ema(folder: Path) -> bool:
    return (folder / EMA).exists()


def load_optimizer(folder: Path, trainable: Tensors, optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its stored moments and step counts, each put on its parameter's device by itself."""
    per_parameter: dict[int, dict[str, Tensor]] = {}
    with _stored(folder / OPTIMIZER) as stored:
        keys_of: dict[str, list[str]] = {}
        for key in stored.keys():  # noqa: SIM118  (it is no dict)
            keys_of.setdefault(key.rpartition("|")[0], []).append(key)
        for position, name in enumerate(_names_in_order(trainable, optimizer)):
            per_parameter[position] = {
                key.rpartition("|")[2]: stored.get_tensor(key).to(trainable[name].device, copy=True)
                for key in keys_of.get(name, [])
            }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": per_parameter, "param_groups": groups})


@contextmanager
def _stored(file: Path) -> Iterator[Any]:
    """The tensors of a checkpoint's file; one that is none, though its hash is right, is told by name."""
    try:
        with safe_open(real_path(file.parent, file.name), framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ValueError(f"'{file}' is damaged ({error}); restore the checkpoint, or remove it") from error


def _copy(file: Path, into: Tensors) -> None:
    """One tensor at a time: what is stored may be larger than the host's memory."""
    with _stored(file) as stored:
        _check_same(file, {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}, into)  # noqa: SIM118
        with torch.no_grad():
            for name, tensor in into.items():
                tensor.copy_(stored.get_tensor(name))


def _check_same(file: Path, shapes: Mapping[str, tuple[int, ...]], into: Tensors) -> None:
    if shapes.keys() != into.keys():
        odd = sorted(shapes.keys() ^ into.keys())
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise ValueError(
            f"checkpoint {file.parent}: {file.name} has other parameters than this run ({odd[0]}{more}); is --policy.train another?"
        )
    for name, shape in shapes.items():
        if shape != tuple(into[name].shape):
            raise ValueError(
                f"checkpoint {file.parent}: '{name}' has shape {shape}, here it is {tuple(into[name].shape)}; "
                f"is the base model another?"
            )


def _optimizer_tensors(trainable: Tensors, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`name|exp_avg` -> tensor; `|` is in no parameter's name."""
    names = _names_in_order(trainable, optimizer)
    state = optimizer.state_dict()["state"]
    return {f"{names[position]}|{key}": value for position, values in state.items() for key, value in values.items()}


def _names_in_order(trainable: Tensors, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the optimizer's parameters as it numbers them: group by group."""
    names = {id(parameter): name for name, parameter in trainable.items()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
