"""Named complete configs: what `--recipe=NAME` starts from.

A recipe is a nested dict with the names of `RunConfig`; the file of `--config_path` and the flags are laid over it.
The numbers of the pi05 recipes are LeRobot's own training presets of PI0.5 (`PI05Config`).
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from vlatune.errors import did_you_mean

PI05 = {
    "policy": {"type": "pi05", "path": "lerobot/pi05_base", "dtype": "bfloat16"},
    "optimizer": {"lr": 2.5e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0},
    "scheduler": {"num_warmup_steps": 1000, "num_decay_steps": 30_000, "decay_lr": 2.5e-6},
    "steps": 3000,
}


@dataclass(frozen=True)
class Recipe:
    description: str
    values: Mapping[str, Any]


def _pi05(train: str, *, gradient_checkpointing: bool = False, **values: Any) -> dict[str, Any]:
    policy = PI05["policy"] | {"train": train, "gradient_checkpointing": gradient_checkpointing}
    return PI05 | {"policy": policy} | values


RECIPES = {
    "tiny": Recipe(
        "a small PI0.5 on the CPU, in minutes; what `vlatune demo` trains",
        {
            "policy": {"type": "pi05", "train": "full", "dtype": "float32"},
            "optimizer": {"lr": 3e-3},
            "scheduler": {"num_warmup_steps": 50, "num_decay_steps": 800, "decay_lr": 1.5e-4},
            "steps": 800,
            "batch_size": 32,
        },
    ),
    "pi05-heads": Recipe(
        "PI0.5, only the projections around the action expert: least memory, quickest step",
        _pi05("heads", batch_size=32),
    ),
    "pi05-expert": Recipe(
        "PI0.5, the action expert and its projections; the vision-language model stays as it is",
        _pi05("expert", batch_size=8),
    ),
    "pi05-lora": Recipe(
        "PI0.5, adapters on language model and action expert, and the projections: learns new scenes on one GPU",
        _pi05("lora", batch_size=4),
    ),
    "pi05-full": Recipe(
        "PI0.5, every weight: 80 GB of GPU memory; layers are computed again in the backward pass",
        _pi05("full", gradient_checkpointing=True, batch_size=4),
    ),
}


def get_recipe(name: str) -> dict[str, Any]:
    """The values of a recipe, as a dict of your own."""
    if name not in RECIPES:
        raise ValueError(f"unknown recipe '{name}'{did_you_mean(name, RECIPES)} (there are {', '.join(RECIPES)})")
    return deepcopy(dict(RECIPES[name].values))
