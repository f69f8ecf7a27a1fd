"""Diffusion Policy: metadata here, torch-free code in the adapter, torch code in the module.

The recipe `diffusion` uses LeRobot's presets (`DiffusionConfig`, defaults of `lerobot-train`).
"""

from typing import Any

from vlatune.config.settings import OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig
from vlatune.policies.diffusion.diffusion_spec import DiffusionOptions
from vlatune.registry import PolicyInfo, Recipe


def _adapter() -> Any:
    from vlatune.policies.diffusion.diffusion_adapter import DiffusionAdapter

    return DiffusionAdapter()


POLICY = PolicyInfo(
    type="diffusion",
    title="Diffusion Policy",
    adapter=_adapter,
    train_modes={"full": "every weight"},
    recipes={
        "diffusion": Recipe(
            "Diffusion Policy from scratch with LeRobot's presets: two observations, no instruction",
            RunConfig(
                policy=PolicyConfig(type="diffusion", train="full"),
                optimizer=OptimizerConfig(
                    type="adam", lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, grad_clip_norm=10.0
                ),
                scheduler=SchedulerConfig(type="diffuser", num_warmup_steps=500, num_decay_steps=100_000, decay_lr=0.0),
                steps=100_000,
                batch_size=8,
                save_freq=20_000,
            ),
        ),
        "diffusion-tiny": Recipe(
            "a tiny Diffusion Policy that trains on a CPU in minutes; used by `vlatune demo --policy=diffusion`",
            RunConfig(
                policy=PolicyConfig(type="diffusion", train="full"),
                optimizer=OptimizerConfig(type="adam", lr=3e-4, betas=(0.95, 0.999), weight_decay=1e-6),
                scheduler=SchedulerConfig(type="diffuser", num_warmup_steps=50, num_decay_steps=500, decay_lr=0.0),
                steps=500,
                batch_size=16,
                eval_freq=100,
                eval_samples=16,
            ),
            small=True,
        ),
    },
    options=DiffusionOptions,
    settings=("gradient_checkpointing",),
    from_scratch=True,
    new_model_fields={
        "normalization_mapping.VISUAL": ("MEAN_STD", "MEAN_STD"),
        "normalization_mapping.STATE": ("MIN_MAX", "MIN_MAX"),
        "normalization_mapping.ACTION": ("MIN_MAX", "MIN_MAX"),
        "pretrained_backbone_weights": ("ResNet18_Weights.IMAGENET1K_V1", None),
    },
)
