"""LeRobot's own PI0.5 or PI0 beside ours: the same batch and draws through both, and how far apart the results are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vlatune.batch import ACTION, IMAGE_PREFIX, NOISE, STATE, TIME, TOKEN_MASK, TOKENS
from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.base import Draw
from vlatune.policies.model_size import write_size
from vlatune.policies.pi05.size import Pi05Size, building_at, read_size
from vlatune.policies.pi05.weights import PI05, Kind
from vlatune.run_setup import Setup, make_setup

Batch = Mapping[str, Tensor]
WAYS = ("heads", "expert", "lora", "full")
DRAWS = 3

LOSS_RTOL = 1e-6
"""Relative, in float32."""
GRADIENT_RTOL = 1e-5
"""Of a parameter's gradient: the norm of the difference over the norm."""
SILENT = 1e-6
"""A parameter whose gradient is a smaller share of the whole than this has none but for rounding: a key's bias, which
moves all logits of a softmax alike."""

SIZE = Pi05Size(
    width=64,
    depth=3,
    mlp_dim=96,
    head_dim=16,
    expert_width=48,
    expert_mlp_dim=80,
    vision_width=32,
    vision_depth=2,
    vision_mlp_dim=48,
    vision_heads=2,
    patch_size=16,
    vocab_size=1024,
)
"""Nine tokens a picture at 48 pixels, and no two sizes alike that could be mixed up unseen."""


def make_base(folder: Path, size: Pi05Size, *, kind: Kind = PI05, **settings: Any) -> Path:
    """A LeRobot folder at a size, with random weights that let every part speak; `settings` as of a `Fit`."""
    from lerobot.configs import PreTrainedConfig

    from vlatune.policies.base import Fit
    from vlatune.policies.pi05.load import CLASSES
    from vlatune.policies.pi05.small import make_small

    make_small(kind, folder, Fit(**{"seed": 0, **settings}))
    config: Any = PreTrainedConfig.from_pretrained(folder)
    with building_at(size):
        policy = CLASSES[kind.type][1](config)
    randomise(policy)
    policy.save_pretrained(folder)
    write_size(folder, size)
    return folder


def make_parity_base(folder: Path, dataset: Path, *, kind: Kind = PI05) -> Path:
    """For a dataset's cameras, dims and sentences."""
    meta = load_meta(str(dataset))
    state, action = (meta.features[key].shape[0] for key in (STATE, ACTION))
    return make_base(
        folder,
        SIZE,
        kind=kind,
        cameras=meta.cameras,
        state_dim=state,
        action_dim=action,
        horizon=5,
        image_size=48,
        tasks=meta.tasks,
    )


def setup_for(dataset: Path, base: Path, *, kind: Kind = PI05) -> Setup:
    policy = PolicyConfig(path=str(base), type=kind.type)
    return make_setup(RunConfig(dataset=DatasetConfig(root=(str(dataset),)), policy=policy))


def draw_batch(setup: Setup, draws: int = DRAWS) -> dict[str, Tensor]:
    """Four samples of the dataset with so many draws of noise and time each, as training gets them."""
    frames = np.arange(4)
    rows = read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))
    draw = Draw(seed=7, flow_samples=draws)
    transforms = setup.adapter.make_transforms(setup.policy, setup.binding, setup.stats, draw)
    return {key: torch.from_numpy(values) for key, values in apply_all(transforms, rows).items()}


def first_draw(draws: Batch) -> dict[str, Tensor]:
    return {**draws, NOISE: draws[NOISE][:, :1], TIME: draws[TIME][:, :1]}


def randomise(policy: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
        elif "norm" in name and name.endswith("weight"):
            parameter.data.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
        else:
            parameter.data.normal_(0.0, 0.1, generator=generator)


def load_lerobot(folder: Path, dtype: str = "float32") -> Any:
    """As a user of LeRobot loads it."""
    from lerobot.configs import PreTrainedConfig

    from vlatune.policies.pi05.load import CLASSES

    size = read_size(folder)
    assert size is not None
    config: Any = PreTrainedConfig.from_pretrained(folder)
    config.dtype = dtype
    with building_at(size):
        policy = CLASSES[config.type][1].from_pretrained(folder, config=config)
    policy.train()
    return policy


def lerobot_loss(policy: Any, batch: Batch, draw: int = 0) -> Tensor:
    """LeRobot's training forward on one of the batch's draws: floats in [0, 1], actions cut to the dataset's dims."""
    model = policy.model
    model.sample_noise = lambda shape, device: batch[NOISE][:, draw]
    model.sample_time = lambda size, device: batch[TIME][:, draw]
    dims = policy.config.output_features[ACTION].shape[0]
    theirs = {key: batch[key].float() / 255.0 for key in batch if key.startswith(IMAGE_PREFIX)}
    theirs |= {key: batch[key] for key in (TOKENS, TOKEN_MASK, STATE) if key in batch}
    theirs[ACTION] = batch[ACTION][..., :dims]
    try:
        return policy.forward(theirs)[0]
    finally:
        del model.sample_noise, model.sample_time


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters that have one, which are then forgotten."""
    module.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative, by norm."""
    ours, theirs = ours.detach().float(), theirs.detach().float()
    return float((ours - theirs).norm() / theirs.norm())


def worst_distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """Of all of `ours` that are not silent: the largest distance, and the parameter's name."""
    whole = torch.stack([theirs[name].float().norm() for name in ours]).norm()
    silent = {name for name in ours if theirs[name].float().norm() < SILENT * whole}
    for name in silent:
        assert name.endswith("self_attn.k_proj.bias"), name
        assert ours[name].float().norm() < SILENT * whole, name
    return max((distance(ours[name], theirs[name]), name) for name in ours if name not in silent)


def randomise_adapters(module: nn.Module) -> None:
    """Adapters that do something: as they are made, their second half is zero, and the first gets no gradient."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0.0, 0.5 * parameter.shape[1] ** -0.5, generator=generator)
