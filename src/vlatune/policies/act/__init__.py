"""ACT: metadata here, torch-free code in `act_adapter.py`, torch code in `act_module.py`.

The recipe `act` uses LeRobot's training presets (`ACTConfig`).
"""

from typing import Any

from vlatune.config.settings import OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig
from vlatune.policies.act.act_spec import ActOptions
from vlatune.registry import PolicyInfo, Recipe


def _adapter() -> Any:
    from vlatune.policies.act.act_adapter import ActAdapter

    return ActAdapter()


POLICY = PolicyInfo(
    type="act",
    title="ACT",
    adapter=_adapter,
    train_modes={"full": "every weight"},
    recipes={
        "act": Recipe(
            "ACT from scratch at the recorded image size, with LeRobot's presets",
            RunConfig(
                policy=PolicyConfig(type="act", train="full"),
                optimizer=OptimizerConfig(lr=1e-5, betas=(0.9, 0.999), weight_decay=1e-4, grad_clip_norm=10.0),
                scheduler=SchedulerConfig(type="none"),
                steps=100_000,
                batch_size=8,
                save_freq=20_000,
            ),
        ),
        "act-tiny": Recipe(
            "a tiny ACT that trains on a CPU in minutes; used by `vlatune demo --policy=act`",
            RunConfig(
                policy=PolicyConfig(type="act", train="full", overrides={"optimizer_lr_backbone": 5e-4}),
                optimizer=OptimizerConfig(lr=5e-4, betas=(0.9, 0.999), weight_decay=1e-4, grad_clip_norm=10.0),
                scheduler=SchedulerConfig(num_warmup_steps=20, num_decay_steps=400, decay_lr=1e-5),
                steps=400,
                batch_size=16,
                eval_freq=100,
                eval_samples=32,
            ),
            small=True,
        ),
    },
    options=ActOptions,
    from_scratch=True,
    downloads_weights=True,
    new_model_fields={
        f"normalization_mapping.{kind}": ("MEAN_STD", "MEAN_STD") for kind in ("VISUAL", "STATE", "ACTION")
    },
)
