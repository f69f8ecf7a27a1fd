"""Tensors of a checkpoint as safetensors: trainable weights, EMA, optimizer and RNG states.

An export of LoRA adapters uses PEFT's layout, which LeRobot applies to the base model; fully
trained heads are stored as `modules_to_save`:

    adapter_config.json  adapter_model.safetensors  config.json with use_peft  processors

RNG states (Python, NumPy, torch, accelerator) are stored as one array per generator with a row per rank.
Sample order and flow-matching noise depend only on the seed; dropout and other sampling in a policy
need the RNG states.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from vlatune.checkpoint.state_file import REMEDY
from vlatune.config.settings import PolicyConfig
from vlatune.storage.files import real_path

TRAINABLE = "trainable.safetensors"
EMA = "ema.safetensors"
OPTIMIZER = "optimizer.safetensors"

Tensors = Mapping[str, Tensor]


def complete(tensor: Tensor) -> Tensor:
    """Return a tensor with all values; all workers call it together for a sharded one (--fsdp)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _part_of(value: Tensor, like: Tensor) -> Tensor:
    """Return what this worker holds of a stored tensor: all of it, unless `like` is sharded."""
    if not isinstance(like, DTensor) or value.ndim == 0:
        return value
    # Without a source rank, nothing is sent: every worker has read the tensor.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def tensors_to_save(
    trainable: Tensors, optimizer: torch.optim.Optimizer, ema: Tensors | None = None
) -> dict[str, Tensors]:
    """Map file names to tensors, still on the device."""
    files = {TRAINABLE: trainable, OPTIMIZER: _optimizer_tensors(trainable, optimizer)}
    return files | ({EMA: ema} if ema is not None else {})


def load_trainable(folder: Path, trainable: Tensors) -> None:
    """Copy the stored tensors into the model; names and shapes must match."""
    _copy(folder / TRAINABLE, trainable)


def load_ema(folder: Path, ema: Tensors) -> None:
    """Load the averaged weights, or start averaging from the trained weights if there are none."""
    _copy(folder / (EMA if (folder / EMA).exists() else TRAINABLE), ema)


def load_result(folder: Path, trainable: Tensors, weights: str = "auto") -> str:
    """Load weights for inference: `ema`, `trained`, or with `auto` the average if there is one."""
    has_ema = (folder / EMA).exists()
    if weights == "ema" and not has_ema:
        raise ValueError(
            f"checkpoint {folder}: it has no averaged weights; leave --weights out, or train with --optimizer.ema_decay"
        )
    file = EMA if weights != "trained" and has_ema else TRAINABLE
    _copy(folder / file, trainable)
    return "ema" if file == EMA else "trained"


def load_optimizer(folder: Path, trainable: Tensors, optimizer: torch.optim.Optimizer) -> None:
    """Load the moments and step counts to each parameter's device."""
    per_parameter: dict[int, dict[str, Tensor]] = {}
    with _stored(folder / OPTIMIZER) as stored:
        keys_of: dict[str, list[str]] = {}
        for key in stored.keys():  # noqa: SIM118  (it is no dict)
            keys_of.setdefault(key.rpartition("|")[0], []).append(key)
        names = _names_in_order(trainable, optimizer)
        if strange := sorted(keys_of.keys() - set(names)):
            raise ValueError(
                f"'{folder / OPTIMIZER}' has moments of '{strange[0][:80]}', which this run does not train; {REMEDY}"
            )
        for position, name in enumerate(names):
            found = {key.rpartition("|")[2]: stored.get_tensor(key) for key in keys_of.get(name, [])}
            _check_moments(folder / OPTIMIZER, name, found, trainable[name])
            like = trainable[name]
            per_parameter[position] = {
                key: _part_of(value, like).to(like.device, copy=True) for key, value in found.items()
            }
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": per_parameter, "param_groups": groups})


def _check_moments(file: Path, name: str, moments: Tensors, parameter: Tensor) -> None:
    """Raise unless the moments are AdamW's, or empty for a parameter without gradients.

    The fused update would access memory out of bounds for moments smaller than the parameter.
    """
    shapes = {"step": torch.Size(()), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
    found = {key: value.shape for key, value in moments.items()}
    if moments and found != shapes:
        listed = {key: tuple(shape) for key, shape in sorted(found.items())}
        raise ValueError(f"'{file}': '{name}' has {listed}, the parameter has {tuple(parameter.shape)}; {REMEDY}")
    for key, value in moments.items():
        _require_finite(file, f"{name}|{key}", value)


def _require_finite(file: Path, name: str, value: Tensor) -> None:
    """Raise on integers and non-finite values, which no run writes."""
    if not value.is_floating_point():
        raise ValueError(f"'{file}': '{name}' is {value.dtype}, expected floats; {REMEDY}")
    if value.numel() and not all(torch.isfinite(one) for one in torch.aminmax(value)):
        raise ValueError(f"'{file}': '{name}' has values that are not finite; {REMEDY}")


@contextmanager
def _stored(file: Path) -> Iterator[Any]:
    """Open a file of tensors; raise ValueError if it is not valid safetensors."""
    try:
        with safe_open(real_path(file.parent, file.name), framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ValueError(f"'{file}' is damaged ({error}); {REMEDY}") from error


def _copy(file: Path, into: Tensors) -> None:
    """Copy one tensor at a time, because the file may exceed the host's memory."""
    with _stored(file) as stored:
        _check_same(file, {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}, into)  # noqa: SIM118
        with torch.no_grad():
            for name, tensor in into.items():
                value = stored.get_tensor(name)
                _require_finite(file, name, value)
                tensor.copy_(_part_of(value, tensor))


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
    """Return optimizer state as `name|exp_avg`; no parameter name contains `|`."""
    names = _names_in_order(trainable, optimizer)
    state = optimizer.state_dict()["state"]
    return {f"{names[position]}|{key}": value for position, values in state.items() for key, value in values.items()}


def _names_in_order(trainable: Tensors, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters in its order."""
    names = {id(parameter): name for name, parameter in trainable.items()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""PEFT's prefix for the wrapped model."""


def write_adapter(policy: Any, folder: Path, config: PolicyConfig) -> None:
    """Save the adapters of a LeRobot policy that has PEFT layers."""
    trained = {name: value.detach() for name, value in policy.named_parameters() if value.requires_grad}
    heads = sorted({name.split(".")[-2] for name in trained if ".lora_" not in name})
    found = policy.peft_config["default"]
    found.modules_to_save = heads
    found.inference_mode = True
    found.base_model_name_or_path, found.revision = config.path, config.revision
    found.save_pretrained(str(folder))
    # PEFT's file format omits the adapter's name.
    tensors = {ADAPTER_PREFIX + name.replace(".default.", "."): value.contiguous() for name, value in trained.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS)


def mark_config(file: Path) -> None:
    """Mark the config as having adapter weights, for LeRobot."""
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"use_peft": True}, indent=2))


LOSSES, LOSS_SUMS = "losses.safetensors", "sums"
"""File and its array (ranks, 2, groups), with sums and counts of each rank by group."""


def load_loss_sums(folder: Path, rank: int, num_workers: int, into: Tensor) -> None:
    """Restore a rank's sums, or an equal share of all if the number of workers changed.

    Keeps zeros if the checkpoint has no sums or other groups (--allow_changed).
    """
    if not (folder / LOSSES).exists():
        return
    with _naming(folder / LOSSES):
        sums_R2G = load_file(real_path(folder, LOSSES))[LOSS_SUMS]
        if sums_R2G.dtype != np.float32 or sums_R2G.ndim != 3 or not np.isfinite(sums_R2G).all():
            raise ValueError(
                f"'{LOSS_SUMS}' is {sums_R2G.dtype} of {sums_R2G.shape}, expected finite float32 of (ranks, 2, groups)"
            )
    if sums_R2G.shape[1:] == into.shape:
        own = sums_R2G[rank] if len(sums_R2G) == num_workers else sums_R2G.sum(axis=0) / np.float32(num_workers)
        into.copy_(torch.from_numpy(own))


RNG = "rng.safetensors"
DEVICE_RNG = "device:"
"""Before the device type, in the name of the accelerator's state."""
Arrays = dict[str, np.ndarray]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_rng(device: torch.device) -> Arrays:
    """Return the RNG states of this process, without a device sync."""
    _, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"  # the only type of NumPy's legacy generator
    found = {
        "python": np.array(words, dtype=np.uint32),
        "python_gauss": np.array([gauss is not None, gauss or 0.0], dtype=np.float64),
        "numpy": np.asarray(key, dtype=np.uint32),
        "numpy_gauss": np.array([position, has_gauss, cached], dtype=np.float64),
        "torch": torch.get_rng_state().numpy(),
    }
    if device.type != "cpu":
        found[DEVICE_RNG + device.type] = torch.get_device_module(device).get_rng_state(device).numpy()
    return found


def set_rng(states: Mapping[str, np.ndarray], device: torch.device) -> None:
    has_gauss, gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss if has_gauss else None))
    position, numpy_gauss, cached = states["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", states["numpy"], int(position), int(numpy_gauss), cached))
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    stored = states.get(DEVICE_RNG + device.type)
    if stored is not None:
        torch.get_device_module(device).set_rng_state(torch.from_numpy(stored.copy()), device)


def stack_rng(by_rank: Sequence[Arrays]) -> Arrays:
    """Stack the states of all ranks into one array per generator."""
    return {name: np.stack([states[name] for states in by_rank]) for name in by_rank[0]}


def load_rng(folder: Path, rank: int, num_workers: int) -> Arrays | None:
    """Return a rank's RNG states; None if the number of workers changed."""
    with _naming(folder / RNG):
        stored = load_file(real_path(folder, RNG))
        if len(stored["torch"]) != num_workers:
            return None
        found = {name: value[rank] for name, value in stored.items()}
        _check_rng(found)
    return found


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Name the file in errors about its content."""
    try:
        yield
    except (SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"'{file}' is damaged ({str(error)[:200]}); {REMEDY}") from error


def _check_rng(states: Mapping[str, np.ndarray]) -> None:
    """Raise unless the states look as `get_rng` writes them, so that the error names the file."""
    forms = {name: (value.shape, value.dtype.str) for name, value in get_rng(torch.device("cpu")).items()}
    found = {name: (value.shape, value.dtype.str) for name, value in states.items() if DEVICE_RNG not in name}
    if found != forms:
        odd = next(name for name in {**forms, **found} if forms.get(name) != found.get(name))
        raise ValueError(f"'{odd}' is {found.get(odd, 'missing')}, expected {forms.get(odd, 'nothing of that name')}")
    position = states["numpy_gauss"][0]
    if not 0 <= states["python"][-1] <= 624 or not 0 <= position <= 624:
        raise ValueError("the position of a generator is out of range")
