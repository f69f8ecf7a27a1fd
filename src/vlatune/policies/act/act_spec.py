"""Define what is read from the folder of an ACT policy. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlatune.policies.base import PolicySpec

PRETRAINED = {
    "ResNet18_Weights.IMAGENET1K_V1": ("resnet18", "timm/resnet18.tv_in1k"),
    "ResNet34_Weights.IMAGENET1K_V1": ("resnet34", "timm/resnet34.tv_in1k"),
    "ResNet50_Weights.IMAGENET1K_V1": ("resnet50", "timm/resnet50.tv_in1k"),
    "ResNet50_Weights.IMAGENET1K_V2": ("resnet50", "timm/resnet50.tv2_in1k"),
}
"""Maps torchvision's weights to their backbone and the hub repository with safetensors."""


@dataclass(frozen=True, kw_only=True)
class ActSpec(PolicySpec):
    fixed_inputs: bool = True
    latent_dim: int
    """0 if trained without a latent."""
    lr_backbone: float
    config: Mapping[str, Any] = field(repr=False)
    """config.json with LeRobot's defaults and the run's overrides."""
