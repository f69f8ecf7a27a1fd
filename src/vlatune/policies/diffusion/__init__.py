"""Diffusion Policy, all of it: its card here, the side without torch in `diffusion_adapter.py`, the torch side in `diffusion_module.py`.

The numbers of the recipe `diffusion` are LeRobot's own training presets (`DiffusionConfig`, and what `lerobot-train` adds).
"""

from typing import TYPE_CHECKING, Any, Literal

from vlatune.policies.registry import Override, Policy, Recipe, at_least

if TYPE_CHECKING:
    from vlatune.policies.diffusion.diffusion_adapter import DiffusionAdapter

Backbone = Literal["resnet18", "resnet34", "resnet50"]
"""A closed list: LeRobot takes any name of torchvision's that begins with resnet."""
Scheduler = Literal["DDPM", "DDIM"]
Betas = Literal["squaredcos_cap_v2", "linear", "scaled_linear", "sigmoid"]
Prediction = Literal["epsilon", "sample"]
MOST_STAGES = 8


def _adapter() -> "DiffusionAdapter":
    from vlatune.policies.diffusion.diffusion_adapter import DiffusionAdapter

    return DiffusionAdapter()


def _ratio(value: Any) -> str | None:
    return None if 0 < value <= 1 else "must be above 0 and at most 1"


def _stages(value: Any) -> str | None:
    good = 1 <= len(value) <= MOST_STAGES and all(width >= 1 for width in value)
    return None if good else f"must be 1 to {MOST_STAGES} widths"


OVERRIDES = {
    "n_obs_steps": Override(int, "Observations that it looks at: the newest and those before it.", 2, at_least(1)),
    "horizon": Override(
        int, "Actions in a chunk, from the oldest observation's on; a multiple of 2 ^ stages.", 64, at_least(1)
    ),
    "n_action_steps": Override(
        int, "Actions of a chunk that a robot makes before it asks anew.", 32, at_least(1), with_base="any"
    ),
    "drop_n_last_frames": Override(
        int, "Frames at the end of each episode that no training sample is made for.", 7, at_least(0), with_base="any"
    ),
    "vision_backbone": Override(Backbone, "The ResNet that looks at pictures.", "resnet18"),
    "resize_shape": Override(
        tuple[int, int] | None,
        "Height and width that pictures are brought to; as recorded when left out.",
        None,
        at_least(1),
    ),
    "crop_ratio": Override(float, "Part of the sides of a resized picture that is looked at.", 1.0, _ratio),
    "crop_shape": Override(
        tuple[int, int] | None, "Height and width of the part that is looked at, without a resize.", None, at_least(1)
    ),
    "crop_is_random": Override(
        bool, "Training looks at a part anywhere in the picture, evaluation at its middle.", True, with_base="any"
    ),
    "use_group_norm": Override(
        bool, "GroupNorm in the backbone instead of BatchNorm; a new model has it unless told otherwise.", False
    ),
    "spatial_softmax_num_keypoints": Override(int, "Points in a picture that are told on.", 32, at_least(1)),
    "use_separate_rgb_encoder_per_camera": Override(bool, "A backbone for each camera, or one for all.", True),
    "down_dims": Override(
        tuple[int, ...], "Widths of the U-Net's stages, each half as long.", (512, 1024, 2048), _stages
    ),
    "kernel_size": Override(int, "Actions that its convolutions see.", 5, at_least(1)),
    "n_groups": Override(int, "Groups of its norms.", 8, at_least(1)),
    "diffusion_step_embed_dim": Override(int, "Width of the time step's code.", 128, at_least(4)),
    "use_film_scale_modulation": Override(
        bool, "Observations scale what the U-Net computes, beside shifting it.", True
    ),
    "noise_scheduler_type": Override(Scheduler, "How actions are sampled.", "DDPM", with_base="any"),
    "num_train_timesteps": Override(int, "Steps between actions and noise.", 100, at_least(1)),
    "num_inference_steps": Override(
        int | None, "Steps that sampling takes; all when left out.", None, at_least(1), with_base="any"
    ),
    "beta_schedule": Override(Betas, "How noise grows over the steps.", "squaredcos_cap_v2"),
    "beta_start": Override(float, "Noise of the first step, where the schedule asks for it.", 1e-4, at_least(0)),
    "beta_end": Override(float, "Noise of the last step, likewise.", 0.02, at_least(0)),
    "prediction_type": Override(Prediction, "What is guessed: the noise, or the actions.", "epsilon"),
    "clip_sample": Override(bool, "Guessed actions are cut to the range that follows.", True, with_base="any"),
    "clip_sample_range": Override(float, "Of normalised actions.", 1.0, at_least(0), with_base="any"),
    "do_mask_loss_for_padding": Override(
        bool, "Actions behind an episode's end do not count in the loss.", False, with_base="any"
    ),
}

POLICY = Policy(
    type="diffusion",
    title="Diffusion Policy",
    adapter=_adapter,
    train_ways={"full": "every weight"},
    recipes={
        "diffusion": Recipe(
            "Diffusion Policy from scratch, for the dataset's cameras, with LeRobot's presets: two observations, no sentence",
            {
                "policy": {"type": "diffusion", "train": "full"},
                "optimizer": {
                    "type": "adam",
                    "lr": 1e-4,
                    "betas": [0.95, 0.999],
                    "eps": 1e-8,
                    "weight_decay": 1e-6,
                    "grad_clip_norm": 10.0,
                },
                "scheduler": {"type": "diffuser", "num_warmup_steps": 500, "num_decay_steps": 100_000, "decay_lr": 0.0},
                "steps": 100_000,
                "batch_size": 8,
                "save_freq": 20_000,
            },
        ),
        "diffusion-tiny": Recipe(
            "a small Diffusion Policy on the CPU, in minutes; what `vlatune demo --policy=diffusion` trains",
            {
                "policy": {"type": "diffusion", "train": "full"},
                "optimizer": {"type": "adam", "lr": 3e-4, "betas": [0.95, 0.999], "weight_decay": 1e-6},
                "scheduler": {"type": "diffuser", "num_warmup_steps": 50, "num_decay_steps": 500, "decay_lr": 0.0},
                "steps": 500,
                "batch_size": 16,
                "eval_freq": 100,
                "eval_samples": 16,
            },
            small=True,
        ),
    },
    settings=("gradient_checkpointing",),
    from_scratch=True,
    overrides=OVERRIDES,
    new_model_fields={
        "normalization_mapping.VISUAL": ("MEAN_STD", "MEAN_STD"),
        "normalization_mapping.STATE": ("MIN_MAX", "MIN_MAX"),
        "normalization_mapping.ACTION": ("MIN_MAX", "MIN_MAX"),
        "pretrained_backbone_weights": ("ResNet18_Weights.IMAGENET1K_V1", None),
    },
)
