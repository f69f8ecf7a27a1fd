"""SmolVLA: metadata here, torch-free code in `adapter.py`, torch code in `model.py`.

The recipe uses LeRobot's training presets (`SmolVLAConfig`) and its documented batch size.
"""

from dataclasses import dataclass

from vlatune.config.fields import setting
from vlatune.config.settings import OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig
from vlatune.policies.pi05 import SETTINGS, FlowOptions, make_tiny_recipe
from vlatune.registry import PolicyInfo, Recipe
from vlatune.storage.limits import limit

HUB_BASE = "lerobot/smolvla_base"


@dataclass(frozen=True)
class SmolVLAOptions(FlowOptions):
    """Fields of LeRobot's `SmolVLAConfig` that a run may set."""

    num_steps: int = setting(10, minimum=1, maximum=limit("sampling_steps"), with_base="any")
    """Number of sampling steps from noise to actions."""
    train_state_proj: bool = setting(True, with_base="any")
    """Train the projection of the state."""


POLICY = PolicyInfo(
    type="smolvla",
    title="SmolVLA",
    adapter="vlatune.policies.smolvla.adapter:SmolVLAAdapter",
    train_modes={
        "expert": "action expert and heads",
        "heads": "projections",
        "lora": "adapters and heads",
        "language": "all but the vision tower",
        "full": "every weight",
    },
    recipes={
        "smolvla": Recipe(
            "SmolVLA, the action expert and its projections; the vision-language model is frozen",
            RunConfig(
                policy=PolicyConfig(type="smolvla", path=HUB_BASE, train="expert", dtype="bfloat16"),
                optimizer=OptimizerConfig(lr=1e-4, betas=(0.9, 0.95), weight_decay=1e-10, grad_clip_norm=10.0),
                scheduler=SchedulerConfig(num_warmup_steps=1000, num_decay_steps=30_000, decay_lr=2.5e-6),
                steps=20_000,
                batch_size=64,
            ),
        ),
        "smolvla-tiny": make_tiny_recipe(
            "a tiny SmolVLA that trains on a CPU in minutes; used by `vlatune demo --policy=smolvla`", "smolvla"
        ),
    },
    options=SmolVLAOptions,
    settings=SETTINGS,
    shards=True,
    hub_base=HUB_BASE,
    max_dims=32,
    has_prompt=True,
    frozen_fields=("train_expert_only", "freeze_vision_encoder"),
)
