"""PI0.5, all of it: its card here, the side without torch in `adapter.py`, the torch side in `module.py`.

The numbers of the recipes are LeRobot's own training presets of PI0.5 (`PI05Config`).
"""

from typing import TYPE_CHECKING, Any

from vlatune.policies.registry import Override, Policy, Recipe, at_least

if TYPE_CHECKING:
    from vlatune.policies.pi05.adapter import Pi05Adapter

HUB_BASE = "lerobot/pi05_base"
PRESETS = {
    "policy": {"type": "pi05", "path": HUB_BASE, "dtype": "bfloat16"},
    "optimizer": {"lr": 2.5e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0},
    "scheduler": {"num_warmup_steps": 1000, "num_decay_steps": 30_000, "decay_lr": 2.5e-6},
    "steps": 3000,
}


def _adapter() -> "Pi05Adapter":
    from vlatune.policies.pi05.adapter import Pi05Adapter

    return Pi05Adapter()


def _recipe(description: str, train: str, *, gradient_checkpointing: bool = False, **values: Any) -> Recipe:
    policy = PRESETS["policy"] | {"train": train, "gradient_checkpointing": gradient_checkpointing}
    return Recipe(description, PRESETS | {"policy": policy} | values)


POLICY = Policy(
    type="pi05",
    title="PI0.5",
    adapter=_adapter,
    train_ways={
        "heads": "projections",
        "expert": "action expert and heads",
        "lora": "adapters and heads",
        "full": "every weight",
    },
    recipes={
        "tiny": Recipe(
            "a small PI0.5 on the CPU, in minutes; what `vlatune demo` trains",
            {
                "policy": {"type": "pi05", "train": "full", "dtype": "float32"},
                "optimizer": {"lr": 3e-3},
                "scheduler": {"num_warmup_steps": 50, "num_decay_steps": 800, "decay_lr": 1.5e-4},
                "steps": 800,
                "batch_size": 32,
                "eval_freq": 100,
                "eval_samples": 64,
            },
            small=True,
        ),
        "pi05-heads": _recipe(
            "PI0.5, only the projections around the action expert: least memory, quickest step", "heads", batch_size=32
        ),
        "pi05-expert": _recipe(
            "PI0.5, the action expert and its projections; the vision-language model stays as it is",
            "expert",
            batch_size=8,
        ),
        "pi05-lora": _recipe(
            "PI0.5, adapters on language model and action expert, and the projections: learns new scenes on one GPU",
            "lora",
            batch_size=4,
        ),
        "pi05-full": _recipe(
            "PI0.5, every weight: 80 GB of GPU memory; layers are computed again in the backward pass",
            "full",
            gradient_checkpointing=True,
            batch_size=4,
        ),
    },
    settings=("dtype", "flow_samples", "gradient_checkpointing", "compile", "lora_rank", "lora_alpha"),
    hub_base=HUB_BASE,
    max_dims=32,
    has_prompt=True,
    overrides={
        "chunk_size": Override(int, "Actions in a chunk.", 50, at_least(1), with_base="any"),
        "n_action_steps": Override(
            int, "Actions of a chunk that a robot makes before it asks anew.", 50, at_least(1), with_base="any"
        ),
        "num_inference_steps": Override(
            int, "Steps from noise to actions when they are sampled.", 10, at_least(1), with_base="any"
        ),
        "use_relative_actions": Override(
            bool, "Learn actions as the way from the state at the beginning of their chunk.", False, with_base="any"
        ),
        "relative_exclude_joints": Override(
            tuple[str, ...],
            "Words, as [gripper]: actions whose name holds one of them stay absolute.",
            ("gripper",),
            with_base="any",
        ),
    },
)
