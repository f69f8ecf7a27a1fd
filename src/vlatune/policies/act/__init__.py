"""ACT, all of it: its card here, the side without torch in `act_adapter.py`, the torch side in `act_module.py`.

The numbers of the recipe `act` are LeRobot's own training presets (`ACTConfig`, and what `lerobot-train` adds to them).
"""

from typing import TYPE_CHECKING, Any, Literal

from vlatune.policies.registry import Override, Policy, Recipe, at_least

if TYPE_CHECKING:
    from vlatune.policies.act.act_adapter import ActAdapter

BACKBONES = {"resnet18": 512, "resnet34": 512, "resnet50": 2048}
"""Those that may be named -> channels of their last feature map. A closed list: LeRobot takes any name of torchvision's."""
Backbone = Literal["resnet18", "resnet34", "resnet50"]
PRETRAINED = {
    "ResNet18_Weights.IMAGENET1K_V1": ("resnet18", "timm/resnet18.tv_in1k"),
    "ResNet34_Weights.IMAGENET1K_V1": ("resnet34", "timm/resnet34.tv_in1k"),
    "ResNet50_Weights.IMAGENET1K_V1": ("resnet50", "timm/resnet50.tv_in1k"),
    "ResNet50_Weights.IMAGENET1K_V2": ("resnet50", "timm/resnet50.tv2_in1k"),
}
"""torchvision's weights that a new model may begin with -> whose they are, and the hub repository that has them as safetensors."""
Pretrained = Literal[
    "ResNet18_Weights.IMAGENET1K_V1",
    "ResNet34_Weights.IMAGENET1K_V1",
    "ResNet50_Weights.IMAGENET1K_V1",
    "ResNet50_Weights.IMAGENET1K_V2",
]


def _adapter() -> "ActAdapter":
    from vlatune.policies.act.act_adapter import ActAdapter

    return ActAdapter()


def _share(value: Any) -> str | None:
    return None if 0 <= value < 1 else "must be at least 0 and below 1"


def _one(value: Any) -> str | None:
    return None if value == 1 else "must be 1: ACT looks at one observation"


OVERRIDES = {
    "chunk_size": Override(int, "Actions in a chunk.", 100, at_least(1)),
    "n_action_steps": Override(
        int, "Actions of a chunk that a robot makes before it asks anew.", 100, at_least(1), with_base="any"
    ),
    "n_obs_steps": Override(int, "Observations that it looks at; 1 is the only one it knows.", 1, _one),
    "vision_backbone": Override(Backbone, "The ResNet that looks at pictures.", "resnet18"),
    "pretrained_backbone_weights": Override(
        Pretrained | None,
        "torchvision's weights that the backbone of a new model begins with, fetched from the hub if its cache lacks them; null "
        "begins with random ones; when left out, they must be in the cache.",
        "ResNet18_Weights.IMAGENET1K_V1",
        with_base="unused",
    ),
    "replace_final_stride_with_dilation": Override(bool, "A finer last feature map (resnet50).", False),
    "pre_norm": Override(bool, "Normalise before a layer's parts, not after them.", False),
    "dim_model": Override(int, "Width of the transformers.", 512, at_least(1)),
    "n_heads": Override(int, "Heads of their attention.", 8, at_least(1)),
    "dim_feedforward": Override(int, "Width inside their layers.", 3200, at_least(1)),
    "feedforward_activation": Override(Literal["relu", "gelu"], "Activation there.", "relu"),
    "n_encoder_layers": Override(int, "Layers over pictures and state.", 4, at_least(1)),
    "n_decoder_layers": Override(int, "Layers over actions.", 1, at_least(1)),
    "use_vae": Override(bool, "Learn with a latent that sums up the actions.", True),
    "latent_dim": Override(int, "Dims of the latent.", 32, at_least(1)),
    "n_vae_encoder_layers": Override(int, "Layers of the latent's encoder.", 4, at_least(1)),
    "dropout": Override(float, "Dropout of the transformers.", 0.1, _share, with_base="any"),
    "kl_weight": Override(float, "Weight of the latent's part of the loss.", 10.0, at_least(0), with_base="any"),
    "temporal_ensemble_coeff": Override(
        float | None, "On a robot: average the chunks of all steps; needs n_action_steps=1.", with_base="any"
    ),
    "optimizer_lr_backbone": Override(float, "Peak learning rate of the backbone.", 1e-5, at_least(0), with_base="any"),
}

POLICY = Policy(
    type="act",
    title="ACT",
    adapter=_adapter,
    train_ways={"full": "every weight"},
    recipes={
        "act": Recipe(
            "ACT from scratch, for the dataset's cameras as they were recorded, with LeRobot's presets",
            {
                "policy": {"type": "act", "train": "full"},
                "optimizer": {
                    "lr": 1e-5,
                    "betas": [0.9, 0.999],
                    "eps": 1e-8,
                    "weight_decay": 1e-4,
                    "grad_clip_norm": 10.0,
                },
                "scheduler": {"type": "none"},
                "steps": 100_000,
                "batch_size": 8,
                "save_freq": 20_000,
            },
        ),
        "act-tiny": Recipe(
            "a small ACT on the CPU; what `vlatune demo --policy=act` trains",
            {
                "policy": {"type": "act", "train": "full", "optimizer_lr_backbone": 5e-4},
                "optimizer": {"lr": 5e-4, "betas": [0.9, 0.999], "weight_decay": 1e-4, "grad_clip_norm": 10.0},
                "scheduler": {"num_warmup_steps": 20, "num_decay_steps": 400, "decay_lr": 1e-5},
                "steps": 400,
                "batch_size": 16,
            },
            small=True,
        ),
    },
    from_scratch=True,
    overrides=OVERRIDES,
)
