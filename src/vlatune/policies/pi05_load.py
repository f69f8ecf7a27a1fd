"""A PI0.5 folder -> LeRobot's `PI05Policy` with every weight in place, held once and in the dtype it is used in.

The model is built without memory for its parameters; then each tensor is read from its file, rounded and put in place,
one at a time. What trains is float32; the rest has the dtype that LeRobot gives it.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import groupby
from pathlib import Path

import draccus
import torch
from lerobot.policies.pi05 import PI05Config, PI05Policy
from safetensors import safe_open
from torch import nn

from vlatune.files import read_file
from vlatune.policies.pi05_size import building_at, read_size
from vlatune.policies.pi05_trainable import is_float32, set_trainable
from vlatune.policies.pi05_weights import StoredTensor, find_tensors


def load_policy(folder: Path, *, train: str, dtype: str | None) -> PI05Policy:
    """On the CPU, with what `train` names trainable; adapters are not added here. The folder's files are checked first."""
    tensors = find_tensors(folder, json.loads(read_file(folder, "config.json")))
    policy = build_policy(folder, dtype)
    set_trainable(policy, train)
    _fill(policy, tensors, train)
    return policy


def build_policy(folder: Path, dtype: str | None) -> PI05Policy:
    """LeRobot's own class, its parameters on the meta device: names, shapes and dtypes without memory."""
    config = read_config(folder)
    config.dtype = dtype or config.dtype
    size = read_size(folder)
    config.device = None  # the constructor would move parameters that are not there yet
    with building_at(size) if size is not None else nullcontext(), parameters_on_meta():
        policy = PI05Policy(config)
    config.device = "cpu"
    return policy


def read_config(folder: Path) -> PI05Config:
    try:
        config = parse_config(folder)
    except Exception as error:  # draccus raises kinds of its own; each means: this LeRobot does not know this config
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ValueError(
            f"policy '{folder}': the installed LeRobot does not understand config.json ({reason}); "
            f"was it written by another version?"
        ) from error
    config.gradient_checkpointing = config.compile_model = False  # ours to decide, see ModuleOptions
    config.freeze_vision_encoder = config.train_expert_only = False
    return config


def parse_config(folder: Path) -> PI05Config:
    """config.json as LeRobot parses it, whose own way leaves a file behind in the folder for temporary files."""
    stored = json.loads(read_file(folder, "config.json"))
    return draccus.decode(PI05Config, {key: value for key, value in stored.items() if key != "type"})


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made inside have parameters without memory, and real buffers: those are in no file.

    Holds for the whole process, as `building_at` does: build one model at a time.
    """
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register_parameter
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def _fill(policy: PI05Policy, tensors: Mapping[str, StoredTensor], train: str) -> None:
    wanted = {name: tensors[name] for name, _ in policy.named_parameters()}
    by_file = sorted(wanted, key=lambda name: (wanted[name].file, wanted[name].key))
    for file, names in groupby(by_file, key=lambda name: wanted[name].file):
        with safe_open(file, framework="pt") as stored:
            for name in names:
                dtype = torch.float32 if is_float32(name, train) else policy.get_parameter(name).dtype
                # A copy: the stored tensor is a window onto the file, which may change.
                _put(policy, name, stored.get_tensor(wanted[name].key).to(dtype=dtype, copy=True))


def _put(policy: PI05Policy, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    filled = nn.Parameter(tensor, requires_grad=policy.get_parameter(name).requires_grad)
    policy.get_submodule(owner).register_parameter(leaf, filled)
