"""ACT's options, spec and latent noise. Does not import torch, because read tasks use it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vlatune.batch import ACTION, NOISE, Columns
from vlatune.config.fields import setting
from vlatune.policies.base import NoiseSpec, PolicySpec

PRETRAINED = {
    "ResNet18_Weights.IMAGENET1K_V1": ("resnet18", "timm/resnet18.tv_in1k"),
    "ResNet34_Weights.IMAGENET1K_V1": ("resnet34", "timm/resnet34.tv_in1k"),
    "ResNet50_Weights.IMAGENET1K_V1": ("resnet50", "timm/resnet50.tv_in1k"),
    "ResNet50_Weights.IMAGENET1K_V2": ("resnet50", "timm/resnet50.tv2_in1k"),
}
"""Maps torchvision's weights to their backbone and the hub repository with safetensors."""


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


@dataclass(frozen=True, kw_only=True)
class ActSpec(PolicySpec):
    fixed_inputs: bool = True
    latent_dim: int
    """0 if trained without a latent."""
    lr_backbone: float
    config: Mapping[str, Any] = field(repr=False)
    """config.json with LeRobot's defaults and the run's overrides."""


@dataclass(frozen=True)
class LatentNoise:
    """Sample N(0, 1) noise of the latent."""

    noise: NoiseSpec
    dims: int

    def __call__(self, columns: Columns) -> Columns:
        noise_NL = np.empty((len(columns[ACTION]), self.dims), dtype=np.float32)
        for row, rng in enumerate(self.noise.generators(columns)):
            rng.standard_normal(out=noise_NL[row], dtype=np.float32)
        return columns | {NOISE: noise_NL}
