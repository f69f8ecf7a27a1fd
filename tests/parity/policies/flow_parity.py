"""Runs LeRobot's PI0.5, PI0 and SmolVLA and ours on the same batch and noise, and compares the results."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from torch import Tensor, nn

from vlatune.batch import (
    ACTION,
    ACTION_IS_PAD,
    IMAGE_PREFIX,
    NOISE,
    STATE,
    TIME,
    TOKEN_MASK,
    TOKENS,
)
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.reader import make_unit, read_unit
from vlatune.data.transforms import apply_all
from vlatune.policies.base import Fit, ModuleOptions, NoiseSpec, PolicyOutput
from vlatune.policies.model_size import building_at, read_size_file, write_size
from vlatune.policies.pi05.size import Pi05Size
from vlatune.policies.smolvla.size import KNOWN, SmolVLMSize
from vlatune.registry import get_adapter, get_policy_info
from vlatune.run_setup import make_setup

Batch = Mapping[str, Tensor]
MODES = {kind: tuple(get_policy_info(kind).train_modes) for kind in ("pi05", "pi0", "smolvla")}
KINDS_AND_MODES = [(kind, train) for kind, modes in MODES.items() for train in modes]
SAMPLES = 3
RANK, ALPHA = 8, 12

LOSS_RTOL = 1e-6
"""Relative, in float32."""
GRADIENT_RTOL = 1e-5
"""Norm of the difference of a parameter's gradients over the norm."""
SILENT = 1e-6
"""Smaller shares of the complete gradient are rounding: a key's bias moves all logits of a softmax by the same amount."""
BF16 = 2.0**-8
"""Largest relative error of rounding to bfloat16."""

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
"""Nine tokens per image of 48 pixels, and no two sizes equal that could be mixed up."""
SMOLVLM_SIZE = SmolVLMSize(
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
"""Nine tokens per image of 48 pixels, whose 36 patches share 16 positions; one layer more than is used."""
SMOLVLA_SETTINGS = {"num_vlm_layers": 3, "expert_width_multiplier": 0.75}


@dataclass(frozen=True)
class Case:
    """A policy with random weights on disk, set up for a dataset."""

    kind: str
    base: Path
    dataset: Path

    @cached_property
    def setup(self):
        policy = PolicyConfig(path=str(self.base), type=self.kind, train="expert")
        return make_setup(RunConfig(dataset=DatasetConfig(root=(str(self.dataset),)), policy=policy))

    @cached_property
    def samples(self) -> dict[str, Tensor]:
        """Four samples with SAMPLES noise samples each; one prompt is shorter, some actions are padding."""
        batch = make_batch(self.setup)
        batch[ACTION_IS_PAD][2:, 3:] = True
        short = int(batch[TOKEN_MASK][0].sum()) - 2
        batch[TOKEN_MASK][0, short:] = False
        batch[TOKENS][0, short:] = self.setup.policy.tokenizer.pad_id
        return batch

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        return one_of(self.samples, 0)

    @cached_property
    def lerobot(self) -> Any:
        """LeRobot's policy with every parameter trainable."""
        return load_lerobot(self.base).requires_grad_(True)

    def load(self, train: str, dtype: str = "float32", **options: Any) -> Any:
        chosen = ModuleOptions(train=train, dtype=dtype, lora_rank=RANK, lora_alpha=ALPHA, **options)
        module = self.setup.adapter.load_module(self.setup.policy, self.setup.binding, chosen)
        randomise_adapters(module)
        return module.train()


def make_case(kind: str, folder: Path, dataset: Path, **settings: Any) -> Case:
    """Create a policy for a dataset's cameras, dims and tasks; `settings` are fields of config.json."""
    meta = load_meta(str(dataset))
    state, action = (meta.features[key].shape[0] for key in (STATE, ACTION))
    fit = Fit(tuple(meta.cameras), state, action, 5, 48, tuple(meta.tasks), 0)
    if kind == "smolvla":
        settings = SMOLVLA_SETTINGS | settings
    return Case(kind, make_base(folder, kind, fit, **settings), dataset)


def make_base(folder: Path, kind: str, fit: Fit, **settings: Any) -> Path:
    get_adapter(kind).make_base(folder, fit, small=True, place=folder)
    config: Any = PreTrainedConfig.from_pretrained(folder)
    vars(config).update(settings)
    size = SMOLVLM_SIZE if kind == "smolvla" else SIZE
    with building_at(size):
        policy = get_policy_class(kind)(config)
    randomise(policy)
    policy.save_pretrained(folder)
    write_size(folder, size)
    return folder


def make_batch(setup: Any, samples: int = SAMPLES) -> dict[str, Tensor]:
    """Return four samples of the dataset as training gets them."""
    frames = np.arange(4)
    rows = read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))
    noise = NoiseSpec(seed=7, flow_samples=samples)
    transforms = setup.adapter.make_transforms(setup.policy, setup.binding, setup.stats, noise)
    return {key: torch.from_numpy(values) for key, values in apply_all(transforms, rows).items()}


def one_of(samples: Batch, number: int) -> dict[str, Tensor]:
    """Return the batch with one of its noise samples."""
    return {**samples, **{key: samples[key][:, number : number + 1] for key in (NOISE, TIME)}}


def randomise(policy: nn.Module) -> None:
    """Give every parameter an effect."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
        elif "norm" in name and name.endswith("weight"):
            parameter.data.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
        else:
            parameter.data.normal_(0.0, 0.1, generator=generator)


def randomise_adapters(module: nn.Module) -> None:
    """Give adapters an effect: new ones are zero in their second half."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0.0, 0.5 * parameter.shape[1] ** -0.5, generator=generator)


def load_lerobot(folder: Path, **settings: Any) -> Any:
    """Load as a user of LeRobot does, but at the folder's size."""
    config: Any = PreTrainedConfig.from_pretrained(folder)
    vars(config).update(settings)
    size = read_size_file(folder, SmolVLMSize if config.type == "smolvla" else Pi05Size)
    with building_at(size or KNOWN[config.vlm_model_name]):
        policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    policy.train()
    return policy


def observation(batch: Batch) -> dict[str, Tensor]:
    """Return the inputs as LeRobot's processors deliver them: images in [0, 1]."""
    images = {key: batch[key].float() / 255.0 for key in batch if key.startswith(IMAGE_PREFIX)}
    return images | {key: batch[key] for key in (TOKENS, TOKEN_MASK, STATE) if key in batch}


def lerobot_loss(policy: Any, batch: Batch, number: int = 0, reduction: str = "mean") -> Tensor:
    """Run LeRobot's training forward on one of the noise samples, with the dataset's action dims."""
    dims = policy.config.output_features[ACTION].shape[0]
    inputs = observation(batch) | {ACTION: batch[ACTION][..., :dims]}
    noise, time = batch[NOISE][:, number], batch[TIME][:, number]
    if policy.config.type == "smolvla":
        inputs[ACTION_IS_PAD] = batch[ACTION_IS_PAD]
        return policy.forward(inputs, noise=noise, time=time, reduction=reduction)[0]
    policy.model.sample_noise = lambda shape, device: noise
    policy.model.sample_time = lambda size, device: time
    try:
        return policy.forward(inputs)[0]
    finally:
        del policy.model.sample_noise, policy.model.sample_time


class Knows(nn.Module):
    """Predicts the actions of its batch."""

    def __init__(self, dims: int | None = None) -> None:
        super().__init__()
        self.weight, self.dims = nn.Parameter(torch.zeros(())), dims

    def forward(self, batch: Batch) -> PolicyOutput:
        return PolicyOutput(self.weight + 0.0)

    def predict(self, batch: Batch, noise: Tensor) -> Tensor:
        return batch[ACTION][..., : self.dims]


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters that have one, and clear them."""
    module.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference relative to `theirs`."""
    ours, theirs = ours.detach().float(), theirs.detach().float()
    return float((ours - theirs).norm() / theirs.norm())


def worst_distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return the largest distance of all gradients that are not silent, and its parameter."""
    total = torch.stack([theirs[name].float().norm() for name in ours]).norm()
    silent = {name for name in ours if theirs[name].float().norm() < SILENT * total}
    for name in silent:
        assert name.endswith("self_attn.k_proj.bias"), name
        assert ours[name].float().norm() < SILENT * total, name
    return max((distance(ours[name], theirs[name]), name) for name in ours if name not in silent)


def check_parity(module: Any, theirs: Any, our_loss: Tensor, their_loss: Tensor) -> None:
    assert distance(our_loss, their_loss) <= LOSS_RTOL
    ours, reference = gradients(module.policy, our_loss), gradients(theirs, their_loss)
    assert ours.keys() == trained(module.policy)  # otherwise DDP would hang, or search for unused parameters
    error, name = worst_distance(ours, reference)
    assert error <= GRADIENT_RTOL, name


def trained(policy: nn.Module) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
