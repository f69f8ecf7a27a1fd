"""LeRobot's own SmolVLA beside ours: the same batch and draws through both."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.smolvla import SmolVLAPolicy
from pi05_parity import randomise
from torch import Tensor

from vlatune.batch import ACTION, ACTION_IS_PAD, IMAGE_PREFIX, NOISE, STATE, TIME, TOKEN_MASK, TOKENS
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.policies.base import Fit
from vlatune.policies.model_size import SIZE_FILE, write_size
from vlatune.policies.smolvla.smolvla_size import KNOWN, SmolVLMSize, building_at
from vlatune.policies.smolvla.smolvla_small import make_smolvla
from vlatune.run_setup import Setup, make_setup

SIZE = SmolVLMSize(
    width=72,
    depth=4,
    mlp_dim=96,
    heads=6,
    kv_heads=2,
    head_dim=16,
    vision_width=32,
    vision_depth=2,
    vision_mlp_dim=48,
    vision_heads=2,
    image_size=32,
    patch_size=8,
    shuffle=2,
    vocab_size=1024,
)
"""Nine tokens a picture at 48 pixels, whose 36 patches share the tower's 16 places; one layer more than is used."""
ARCHITECTURE = {"num_vlm_layers": 3, "expert_width_multiplier": 0.75}
OBSERVED = (STATE, TOKENS, TOKEN_MASK)


def make_parity_base(folder: Path, dataset: Path, **architecture: Any) -> Path:
    """For a dataset's cameras, dims and sentences, at SIZE, with random weights that let every part speak."""
    meta = load_meta(str(dataset))
    state, action = (meta.features[key].shape[0] for key in (STATE, ACTION))
    make_smolvla(folder, Fit(tuple(meta.cameras), state, action, 5, 48, tuple(meta.tasks), 0))
    config: Any = PreTrainedConfig.from_pretrained(folder)
    vars(config).update(ARCHITECTURE | architecture)
    with building_at(SIZE):
        policy = SmolVLAPolicy(config)
    randomise(policy)
    policy.save_pretrained(folder)
    write_size(folder, SIZE)
    return folder


def setup_for(dataset: Path, base: Path, **overrides: Any) -> Setup:
    policy = PolicyConfig(path=str(base), type="smolvla", train="expert", overrides=overrides)
    return make_setup(RunConfig(dataset=DatasetConfig(root=(str(dataset),)), policy=policy))


def load_lerobot(folder: Path, **flags: Any) -> Any:
    """By LeRobot's factory; only what it would ask a hub for is answered here."""
    config: Any = PreTrainedConfig.from_pretrained(folder)
    vars(config).update(flags)
    size = SIZE if (folder / SIZE_FILE).exists() else KNOWN[config.vlm_model_name]
    with building_at(size):
        policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    policy.train()
    return policy


def observation(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As LeRobot's processors deliver it: floats in [0, 1]."""
    images = {key: batch[key].float() / 255.0 for key in batch if key.startswith(IMAGE_PREFIX)}
    return images | {key: batch[key] for key in OBSERVED}


def lerobot_loss(policy: Any, batch: Mapping[str, Tensor], draw: int = 0, reduction: str = "mean") -> Tensor:
    dims = policy.config.output_features[ACTION].shape[0]
    given = observation(batch) | {ACTION: batch[ACTION][..., :dims], ACTION_IS_PAD: batch[ACTION_IS_PAD]}
    return policy.forward(given, noise=batch[NOISE][:, draw], time=batch[TIME][:, draw], reduction=reduction)[0]
