"""ACT, all of it: its card here, the side without torch in `act_adapter.py`, the torch side in `act_module.py`.

The numbers of the recipe `act` are LeRobot's own training presets (`ACTConfig`, and what `lerobot-train` adds to them).
"""

from typing import TYPE_CHECKING

from vlatune.policies.act.act_options import OVERRIDES
from vlatune.policies.registry import Policy, Recipe

if TYPE_CHECKING:
    from vlatune.policies.act.act_adapter import ActAdapter


def _adapter() -> "ActAdapter":
    from vlatune.policies.act.act_adapter import ActAdapter

    return ActAdapter()


POLICY = Policy(
    type="act",
    title="ACT",
    adapter=_adapter,
    train_ways={"full": "every weight"},
    recipes={
        "act": Recipe(
            "ACT from scratch, for the dataset's cameras as they were recorded, with LeRobot's presets",
            {
                "policy": {"type": "act", "train": "full"},
                "optimizer": {
                    "lr": 1e-5,
                    "betas": [0.9, 0.999],
                    "eps": 1e-8,
                    "weight_decay": 1e-4,
                    "grad_clip_norm": 10.0,
                },
                "scheduler": {"type": "none"},
                "steps": 100_000,
                "batch_size": 8,
                "save_freq": 20_000,
            },
        ),
        "act-tiny": Recipe(
            "a small ACT on the CPU; what `vlatune demo --policy=act` trains",
            {
                "policy": {"type": "act", "train": "full", "optimizer_lr_backbone": 5e-4},
                "optimizer": {"lr": 5e-4, "betas": [0.9, 0.999], "weight_decay": 1e-4, "grad_clip_norm": 10.0},
                "scheduler": {"num_warmup_steps": 20, "num_decay_steps": 400, "decay_lr": 1e-5},
                "steps": 400,
                "batch_size": 16,
                "eval_freq": 100,
                "eval_samples": 32,
            },
            small=True,
        ),
    },
    from_scratch=True,
    fetches_start=True,
    overrides=OVERRIDES,
    new_model_fields={
        f"normalization_mapping.{kind}": ("MEAN_STD", "MEAN_STD") for kind in ("VISUAL", "STATE", "ACTION")
    },
)
