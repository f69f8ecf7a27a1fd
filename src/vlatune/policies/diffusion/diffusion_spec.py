"""Define what is read from the folder of a Diffusion Policy. Imports no torch."""

from dataclasses import dataclass

from vlatune.policies.base import PolicySpec


@dataclass(frozen=True, kw_only=True)
class DiffusionSpec(PolicySpec):
    crop_hw: tuple[int, int] | None
    """Crop of the delivered image; None keeps all of it."""
    crop_is_random: bool
    """Crop randomly in training, independently for cameras with separate encoders, as in
    LeRobot."""
    one_encoder: bool
    """All cameras share one encoder."""
    num_train_timesteps: int
