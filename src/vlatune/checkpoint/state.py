"""The tensors of a checkpoint: what trains, its average if there is one, the optimizer's, and the random generators'.
safetensors, no pickle.

An export has the adapters of a LoRA run by themselves, in PEFT's layout: LeRobot puts them onto the base when it loads the folder.

    adapter_config.json  adapter_model.safetensors  config.json with use_peft  processors

The heads, which are trained whole, go along as PEFT's `modules_to_save`.

The random generators of a rank (python, NumPy, torch, CUDA) become plain arrays, and back. The order of samples and the noise of flow matching are pure functions of the seed and a place and need none of this;
dropout and whatever a policy draws by itself do. They are stored as one tensor per generator with a row per
rank.
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

from vlatune.config import PolicyConfig
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
            _check_moments(folder / OPTIMIZER, name, per_parameter[position], trainable[name])
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": per_parameter, "param_groups": groups})


def _check_moments(file: Path, name: str, moments: Tensors, parameter: Tensor) -> None:
    """AdamW's, or none of a parameter that had no gradient. The fused update believes that they have the parameter's size,
    and would read and write behind smaller ones.
    """
    shapes = {"step": torch.Size(()), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
    found = {key: value.shape for key, value in moments.items()}
    if moments and (found != shapes or not all(value.is_floating_point() for value in moments.values())):
        told = {key: f"{value.dtype} {tuple(value.shape)}" for key, value in sorted(moments.items())}
        raise ValueError(
            f"checkpoint {file.parent}: {file.name}: '{name}' has {told}, the parameter has {tuple(parameter.shape)}; restore the "
            f"checkpoint, or remove it"
        )


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


ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""PEFT's name for the model that it wraps."""


def write_adapter(policy: Any, folder: Path, config: PolicyConfig) -> None:
    """`policy` is LeRobot's, with PEFT's layers in it and the trained values in place."""
    trained = {name: value.detach() for name, value in policy.named_parameters() if value.requires_grad}
    heads = sorted({name.split(".")[-2] for name in trained if ".lora_" not in name})
    found = policy.peft_config["default"]
    found.modules_to_save = heads
    found.inference_mode = True
    found.base_model_name_or_path, found.revision = config.path, config.revision
    found.save_pretrained(str(folder))
    save_file(adapter_tensors(trained), folder / ADAPTER_WEIGHTS)


def adapter_tensors(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under PEFT's names: an adapter's own name is no part of them in a file."""
    return {ADAPTER_PREFIX + name.replace(".default.", "."): value.contiguous() for name, value in trained.items()}


def mark_config(file: Path) -> None:
    """Tell LeRobot that the weights beside this config are an adapter's."""
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"use_peft": True}, indent=2))


LOSSES, LOSS_SUMS = "losses.safetensors", "sums"
"""File, and the one array in it: (ranks, 2, groups), each rank's sums and counts by group."""


def load_loss_sums(folder: Path, rank: int, num_workers: int, into: Tensor) -> None:
    """A rank's sums go on; where the number of workers is another, each has the same part of all. Checkpoints of older
    versions have none, and those of other groups (--allow_changed) are of no use: sums then begin with zero.
    """
    if not (folder / LOSSES).exists():
        return
    try:
        sums_R2G = load_file(real_path(folder, LOSSES))[LOSS_SUMS]
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"'{folder / LOSSES}' is damaged ({str(error)[:200]}); restore the checkpoint, or remove it"
        ) from error
    if sums_R2G.dtype != np.float32 or sums_R2G.ndim != 3 or not np.isfinite(sums_R2G).all():
        raise ValueError(
            f"'{folder / LOSSES}' is damaged ('{LOSS_SUMS}' is {sums_R2G.dtype} of {sums_R2G.shape}, expected finite float32 of "
            f"(ranks, 2, groups)); restore the checkpoint, or remove it"
        )
    if sums_R2G.shape[1:] == into.shape:
        own = sums_R2G[rank] if len(sums_R2G) == num_workers else sums_R2G.sum(axis=0) / np.float32(num_workers)
        into.copy_(torch.from_numpy(own))


RNG = "rng.safetensors"
Arrays = dict[str, np.ndarray]


def seed_all(seed: int) -> None:
    """All generators of this process begin anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_rng(device: torch.device) -> Arrays:
    """This process's generators; a reading of the CUDA one waits for nothing."""
    _, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"  # NumPy's legacy generator has no other
    found = {
        "python": np.array(words, dtype=np.uint32),
        "python_gauss": np.array([gauss is not None, gauss or 0.0], dtype=np.float64),
        "numpy": np.asarray(key, dtype=np.uint32),
        "numpy_gauss": np.array([position, has_gauss, cached], dtype=np.float64),
        "torch": torch.get_rng_state().numpy(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device).numpy()
    return found


def set_rng(states: Mapping[str, np.ndarray], device: torch.device) -> None:
    has_gauss, gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss if has_gauss else None))
    position, numpy_gauss, cached = states["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", states["numpy"], int(position), int(numpy_gauss), cached))
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(torch.from_numpy(states["cuda"].copy()), device)


def stack_rng(by_rank: Sequence[Arrays]) -> Arrays:
    """The states of all ranks -> one array per generator, its first axis the rank."""
    return {name: np.stack([states[name] for states in by_rank]) for name in by_rank[0]}


def load_rng(folder: Path, rank: int, num_workers: int) -> Arrays | None:
    """A rank's states; None when the checkpoint was made by another number of workers."""
    try:
        stored = load_file(real_path(folder, RNG))
        found = {name: value[rank] for name, value in stored.items()} if len(stored["torch"]) == num_workers else None
        if found is not None:
            _check_rng(found)
    except (SafetensorError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"'{folder / RNG}' is damaged ({str(error)[:200]}); restore the checkpoint, or remove it"
        ) from error
    return found


def _check_rng(states: Mapping[str, np.ndarray]) -> None:
    """As `get_rng` writes them: what the generators refuse would come as their error, far from the file's name."""
    forms = {name: (value.shape, value.dtype.str) for name, value in get_rng(torch.device("cpu")).items()}
    found = {name: (value.shape, value.dtype.str) for name, value in states.items() if name != "cuda"}
    if found != forms:
        odd = next(name for name in {**forms, **found} if forms.get(name) != found.get(name))
        raise ValueError(f"'{odd}' is {found.get(odd, 'missing')}, expected {forms.get(odd, 'nothing of that name')}")
    position = states["numpy_gauss"][0]
    if not 0 <= states["python"][-1] <= 624 or not 0 <= position <= 624:
        raise ValueError("a generator's place is outside of its words")
