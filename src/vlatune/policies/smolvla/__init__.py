"""SmolVLA, all of it: its card here, the side without torch in `smolvla_adapter.py`, the torch side in `smolvla_module.py`.

The numbers of the recipe are LeRobot's own training presets of SmolVLA (`SmolVLAConfig`) and the batch of its documentation.
"""

from typing import TYPE_CHECKING

from vlatune.policies.registry import Override, Policy, Recipe, at_least

if TYPE_CHECKING:
    from vlatune.policies.smolvla.smolvla_adapter import SmolVLAAdapter

HUB_BASE = "lerobot/smolvla_base"


def _adapter() -> "SmolVLAAdapter":
    from vlatune.policies.smolvla.smolvla_adapter import SmolVLAAdapter

    return SmolVLAAdapter()


POLICY = Policy(
    type="smolvla",
    title="SmolVLA",
    adapter=_adapter,
    train_ways={
        "expert": "action expert and heads",
        "heads": "projections",
        "lora": "adapters and heads",
        "language": "all but the vision tower",
        "full": "every weight",
    },
    recipes={
        "smolvla": Recipe(
            "SmolVLA, the action expert and its projections; the vision-language model stays as it is",
            {
                "policy": {"type": "smolvla", "path": HUB_BASE, "train": "expert", "dtype": "bfloat16"},
                "optimizer": {
                    "lr": 1e-4,
                    "betas": [0.9, 0.95],
                    "eps": 1e-8,
                    "weight_decay": 1e-10,
                    "grad_clip_norm": 10.0,
                },
                "scheduler": {"num_warmup_steps": 1000, "num_decay_steps": 30_000, "decay_lr": 2.5e-6},
                "steps": 20_000,
                "batch_size": 64,
            },
        ),
        "smolvla-tiny": Recipe(
            "a small SmolVLA on the CPU, in minutes; what `vlatune demo --policy=smolvla` trains",
            {
                "policy": {"type": "smolvla", "train": "full", "dtype": "float32"},
                "optimizer": {"lr": 3e-3},
                "scheduler": {"num_warmup_steps": 50, "num_decay_steps": 800, "decay_lr": 1.5e-4},
                "steps": 800,
                "batch_size": 32,
                "eval_freq": 100,
                "eval_samples": 64,
            },
            small=True,
        ),
    },
    settings=("dtype", "flow_samples", "gradient_checkpointing", "compile", "lora_rank", "lora_alpha", "keep_features"),
    hub_base=HUB_BASE,
    max_dims=32,
    has_prompt=True,
    overrides={
        "chunk_size": Override(int, "Actions in a chunk.", 50, at_least(1), with_base="any"),
        "n_action_steps": Override(
            int, "Actions of a chunk that a robot makes before it asks anew.", 50, at_least(1), with_base="any"
        ),
        "num_steps": Override(
            int, "Steps from noise to actions when they are sampled.", 10, at_least(1), with_base="any"
        ),
        "train_state_proj": Override(
            bool, "Train the state's projection, too; false keeps the base's.", True, with_base="any"
        ),
    },
    frozen_fields={"train_expert_only": True, "freeze_vision_encoder": True},
)
