"""The adapters of a LoRA run by themselves, in PEFT's layout: LeRobot puts them onto the base when it loads the folder.

    adapter_config.json  adapter_model.safetensors  config.json with use_peft  processors

The heads, which are trained whole, go along as PEFT's `modules_to_save`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vlatune.config import PolicyConfig

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
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
    save_file(adapter_tensors(trained), folder / WEIGHTS)


def adapter_tensors(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under PEFT's names: an adapter's own name is no part of them in a file."""
    return {PREFIX + name.replace(".default.", "."): value.contiguous() for name, value in trained.items()}


def mark_config(file: Path) -> None:
    """Tell LeRobot that the weights beside this config are an adapter's."""
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"use_peft": True}, indent=2))
