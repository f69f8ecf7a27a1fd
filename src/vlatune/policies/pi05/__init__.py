"""PI0.5: metadata here, torch-free code in `adapter.py`, torch code in `model.py`.

The recipes use LeRobot's training presets (`PI05Config`).
"""

from dataclasses import dataclass, replace

from vlatune.config.fields import setting
from vlatune.config.settings import OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig
from vlatune.registry import PolicyInfo, Recipe
from vlatune.storage.limits import limit

HUB_BASE = "lerobot/pi05_base"
BASE = PolicyConfig(type="pi05", path=HUB_BASE, dtype="bfloat16")
OPTIMIZER = OptimizerConfig(lr=2.5e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)
SCHEDULER = SchedulerConfig(num_warmup_steps=1000, num_decay_steps=30_000, decay_lr=2.5e-6)
TRAIN_MODES = {
    "heads": "projections",
    "expert": "action expert and heads",
    "lora": "adapters and heads",
    "full": "every weight",
}
SETTINGS = ("dtype", "flow_samples", "gradient_checkpointing", "compile", "lora_rank", "lora_alpha")
SETTINGS += ("keep_prefix", "keep_prefix_dtype")


@dataclass(frozen=True)
class FlowOptions:
    """Fields of LeRobot's configs of flow-matching policies that a run may set."""

    chunk_size: int = setting(50, minimum=1, with_base="any")
    """Number of actions in a chunk."""
    n_action_steps: int = setting(50, minimum=1, with_base="any")
    """Number of actions that a robot executes before it queries the policy again."""
    tokenizer_max_length: int = setting(48, minimum=1, with_base="any")
    """Maximum number of prompt tokens; longer prompts are truncated."""


@dataclass(frozen=True)
class Pi0Options(FlowOptions):
    """Fields of LeRobot's `PI0Config` that a run may set."""

    num_inference_steps: int = setting(10, minimum=1, maximum=limit("sampling_steps"), with_base="any")
    """Number of sampling steps from noise to actions."""
    use_relative_actions: bool = setting(False, with_base="any")
    """Predict actions relative to the state at the start of the chunk."""
    relative_exclude_joints: tuple[str, ...] = setting(("gripper",), with_base="any")
    """Keep action dims absolute whose name contains one of these words."""


@dataclass(frozen=True)
class Pi05Options(Pi0Options):
    """Fields of LeRobot's `PI05Config` that a run may set."""

    tokenizer_max_length: int = setting(200, minimum=1, with_base="any")


def make_recipe(description: str, policy: PolicyConfig, batch_size: int) -> Recipe:
    config = RunConfig(policy=policy, optimizer=OPTIMIZER, scheduler=SCHEDULER, steps=3000, batch_size=batch_size)
    return Recipe(description, config)


def make_tiny_recipe(description: str, type_name: str) -> Recipe:
    config = RunConfig(
        policy=PolicyConfig(type=type_name, train="full", dtype="float32"),
        optimizer=OptimizerConfig(lr=3e-3),
        scheduler=SchedulerConfig(num_warmup_steps=50, num_decay_steps=800, decay_lr=1.5e-4),
        steps=800,
        batch_size=32,
        eval_freq=100,
        eval_samples=64,
    )
    return Recipe(description, config, small=True)


POLICY = PolicyInfo(
    type="pi05",
    title="PI0.5",
    adapter="vlatune.policies.pi05.adapter:Pi05Adapter",
    train_modes=TRAIN_MODES,
    recipes={
        "tiny": make_tiny_recipe("a tiny PI0.5 that trains on a CPU in minutes; used by `vlatune demo`", "pi05"),
        "pi05-heads": make_recipe(
            "PI0.5, only the projections around the action expert: least memory, fastest step",
            replace(BASE, train="heads"),
            batch_size=32,
        ),
        "pi05-expert": make_recipe(
            "PI0.5, the action expert and its projections; the vision-language model is frozen",
            replace(BASE, train="expert"),
            batch_size=8,
        ),
        "pi05-lora": make_recipe(
            "PI0.5, LoRA adapters on language model and action expert, and the projections: new scenes on one GPU",
            replace(BASE, train="lora"),
            batch_size=4,
        ),
        "pi05-full": make_recipe(
            "PI0.5, every weight with gradient checkpointing: 80 GB of GPU memory",
            replace(BASE, train="full", gradient_checkpointing=True),
            batch_size=4,
        ),
    },
    options=Pi05Options,
    settings=SETTINGS,
    shards=True,
    hub_base=HUB_BASE,
    max_dims=32,
    has_prompt=True,
)
