"""ACT: metadata here, torch-free code in `act_adapter.py`, torch code in `act_module.py`.

The recipe `act` uses LeRobot's training presets (`ACTConfig`).
"""

from dataclasses import dataclass
from typing import Literal

from vlatune.config.fields import setting
from vlatune.config.settings import OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig
from vlatune.registry import PolicyInfo, Recipe


@dataclass(frozen=True)
class ActOptions:
    """Fields of LeRobot's `ACTConfig` that a run may set."""

    chunk_size: int = setting(100, minimum=1)
    """Number of actions in a chunk."""
    n_action_steps: int = setting(100, minimum=1, with_base="any")
    """Number of actions that a robot executes before it queries the policy again."""
    n_obs_steps: Literal[1] = setting(1)
    """Number of observations; ACT supports only 1."""
    vision_backbone: Literal["resnet18", "resnet34", "resnet50"] = setting("resnet18")
    """Image encoder."""
    pretrained_backbone_weights: (
        Literal[
            "ResNet18_Weights.IMAGENET1K_V1",
            "ResNet34_Weights.IMAGENET1K_V1",
            "ResNet50_Weights.IMAGENET1K_V1",
            "ResNet50_Weights.IMAGENET1K_V2",
        ]
        | None
    ) = setting("ResNet18_Weights.IMAGENET1K_V1", with_base="unused")
    """Initial weights of a new backbone, downloaded from the hub; null starts from random weights."""
    replace_final_stride_with_dilation: bool = setting(False)
    """Double the resolution of the last feature map (resnet50 only)."""
    pre_norm: bool = setting(False)
    """Normalise before, not after, attention and feed-forward layers."""
    dim_model: int = setting(512, minimum=1)
    """Width of the transformers."""
    n_heads: int = setting(8, minimum=1)
    """Number of attention heads."""
    dim_feedforward: int = setting(3200, minimum=1)
    """Width of the feed-forward layers."""
    feedforward_activation: Literal["relu", "gelu"] = setting("relu")
    """Activation of the feed-forward layers."""
    n_encoder_layers: int = setting(4, minimum=1)
    """Number of encoder layers."""
    n_decoder_layers: int = setting(1, minimum=1)
    """Number of decoder layers."""
    use_vae: bool = setting(True)
    """Train with a variational latent of the action chunk."""
    latent_dim: int = setting(32, minimum=1)
    """Number of dims of the latent."""
    n_vae_encoder_layers: int = setting(4, minimum=1)
    """Number of layers of the latent's encoder."""
    dropout: float = setting(0.1, minimum=0, below=1, with_base="any")
    """Dropout of the transformers."""
    kl_weight: float = setting(10.0, minimum=0, with_base="any")
    """Weight of the KL divergence in the loss."""
    temporal_ensemble_coeff: float | None = setting(None, with_base="any")
    """Average overlapping chunks on the robot with this decay; needs n_action_steps=1."""
    optimizer_lr_backbone: float = setting(1e-5, minimum=0, with_base="any")
    """Peak learning rate of the backbone."""


POLICY = PolicyInfo(
    type="act",
    title="ACT",
    adapter="vlatune.policies.act.act_adapter:ActAdapter",
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
