"""Diffusion Policy: metadata here, torch-free code in the adapter, torch code in the module.

The recipe `diffusion` uses LeRobot's presets (`DiffusionConfig`, defaults of `lerobot-train`).
"""

from dataclasses import dataclass
from typing import Literal

from vlatune.config.fields import setting
from vlatune.config.settings import OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig
from vlatune.registry import PolicyInfo, Recipe
from vlatune.storage.limits import limit

MAX_STEPS = limit("sampling_steps")


@dataclass(frozen=True)
class DiffusionOptions:
    """Fields of LeRobot's `DiffusionConfig` that a run may set."""

    n_obs_steps: int = setting(2, minimum=1)
    """Number of observations: the newest and the ones before it."""
    horizon: int = setting(64, minimum=1)
    """Number of actions in a chunk, from the oldest observation; a multiple of 2 ^ len(down_dims)."""
    n_action_steps: int = setting(32, minimum=1, with_base="any")
    """Number of actions that a robot executes before it queries the policy again."""
    drop_n_last_frames: int = setting(7, minimum=0, with_base="any")
    """Number of frames at the end of each episode that start no training sample."""
    vision_backbone: Literal["resnet18", "resnet34", "resnet50"] = setting("resnet18")
    """Image encoder."""
    resize_shape: tuple[int, int] | None = setting(None, minimum=1)
    """Height and width to resize images to (default: as recorded)."""
    crop_ratio: float = setting(1.0, above=0, maximum=1)
    """Fraction of the height and width of resized images to crop to."""
    crop_shape: tuple[int, int] | None = setting(None, minimum=1)
    """Height and width to crop images to, if they are not resized."""
    crop_is_random: bool = setting(True, with_base="any")
    """Crop training images at random; evaluation always crops the centre."""
    use_group_norm: bool = setting(False)
    """Use GroupNorm instead of BatchNorm in the backbone (new models: true)."""
    spatial_softmax_num_keypoints: int = setting(32, minimum=1)
    """Number of spatial-softmax keypoints."""
    use_separate_rgb_encoder_per_camera: bool = setting(True)
    """Use a separate image encoder for each camera."""
    down_dims: tuple[int, ...] = setting((512, 1024, 2048), minimum=1)
    """Widths of the U-Net's stages; each halves the length."""
    kernel_size: int = setting(5, minimum=1)
    """Kernel size of the U-Net's convolutions."""
    n_groups: int = setting(8, minimum=1)
    """Number of groups of the U-Net's GroupNorm."""
    diffusion_step_embed_dim: int = setting(128, minimum=4)
    """Width of the embedding of the diffusion step."""
    use_film_scale_modulation: bool = setting(True)
    """Let observations scale, not only shift, the U-Net's features (FiLM)."""
    noise_scheduler_type: Literal["DDPM", "DDIM"] = setting("DDPM", with_base="any")
    """Sampling algorithm."""
    num_train_timesteps: int = setting(100, minimum=1, maximum=MAX_STEPS)
    """Number of diffusion steps."""
    num_inference_steps: int | None = setting(None, minimum=1, maximum=MAX_STEPS, with_base="any")
    """Number of sampling steps (default: all diffusion steps)."""
    beta_schedule: Literal["squaredcos_cap_v2", "linear", "scaled_linear", "sigmoid"] = setting("squaredcos_cap_v2")
    """Noise schedule."""
    beta_start: float = setting(1e-4, minimum=0)
    """Noise of the first diffusion step."""
    beta_end: float = setting(0.02, minimum=0)
    """Noise of the last diffusion step."""
    prediction_type: Literal["epsilon", "sample"] = setting("epsilon")
    """Predict the noise (epsilon) or the actions (sample)."""
    clip_sample: bool = setting(True, with_base="any")
    """Clip predicted actions while sampling."""
    clip_sample_range: float = setting(1.0, minimum=0, with_base="any")
    """Maximum absolute value of normalised actions with clip_sample."""
    do_mask_loss_for_padding: bool = setting(False, with_base="any")
    """Exclude actions after the end of the episode from the loss."""


POLICY = PolicyInfo(
    type="diffusion",
    title="Diffusion Policy",
    adapter="vlatune.policies.diffusion.diffusion_adapter:DiffusionAdapter",
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
