"""Diffusion Policy, all of it: its card here, the side without torch in `adapter.py`, the torch side in `module.py`.

The numbers of the recipe are LeRobot's own training presets of it (`DiffusionConfig`, and `AdamConfig` for the clipping).
"""

from typing import TYPE_CHECKING

from vlatune.policies.registry import Policy, Recipe

if TYPE_CHECKING:
    from vlatune.policies.diffusion.adapter import DiffusionAdapter

STEPS = 100_000


def _adapter() -> "DiffusionAdapter":
    from vlatune.policies.diffusion.adapter import DiffusionAdapter

    return DiffusionAdapter()


POLICY = Policy(
    type="diffusion",
    title="Diffusion Policy",
    adapter=_adapter,
    train_ways={"full": "every weight"},
    recipes={
        "diffusion": Recipe(
            "Diffusion Policy, every weight, from random weights or a base: two observations, no sentence",
            {
                "policy": {"type": "diffusion", "train": "full"},
                "optimizer": {
                    "lr": 1e-4,
                    "betas": [0.95, 0.999],
                    "eps": 1e-8,
                    "weight_decay": 1e-6,
                    "grad_clip_norm": 10.0,
                },
                "scheduler": {"num_warmup_steps": 500, "num_decay_steps": STEPS, "decay_lr": 0.0},
                "steps": STEPS,
                "batch_size": 8,
            },
        ),
        "diffusion-small": Recipe(
            "a small Diffusion Policy on the CPU, in minutes",
            {
                "policy": {"type": "diffusion", "train": "full"},
                "optimizer": {"lr": 1e-3, "betas": [0.95, 0.999], "weight_decay": 1e-6},
                "scheduler": {"num_warmup_steps": 20, "num_decay_steps": 300, "decay_lr": 0.0},
                "steps": 300,
                "batch_size": 16,
            },
            small=True,
        ),
    },
    settings=("gradient_checkpointing",),
    from_scratch=True,
)
