"""PI0.5, the torch side: LeRobot's own modules and weights behind `forward(batch) -> loss`.

Goes around `PI05Policy.forward`, which pulls the loss to the host three times a step, and calls the model inside
with noise and time that came with the batch. Weights are loaded strictly: a missing or unexpected tensor is an
error, where LeRobot prints a line and trains from random weights.
"""

import json
import logging
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi05 import PI05Config, PI05Policy
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vlatune.batch import ACTION, NOISE, TIME, TOKEN_MASK, TOKENS
from vlatune.policies.base import Binding, PolicySpec
from vlatune.policies.pi05_size import building_at, read_size

HEADS = r"model\.(action_in_proj|action_out_proj|time_mlp_in|time_mlp_out)\."
EXPERT = r"model\.paligemma_with_expert\.gemma_expert\.model\."
TRAINED = {"heads": HEADS, "expert": f"{HEADS}|{EXPERT}", "full": r"model\."}
UNUSED = r"lm_head\.|language_model\.norm\.|language_model\.layers\.{last}\.(self_attn\.(q|o)_proj|mlp|post_attention_layernorm)\."
"""Parameters that cannot influence the loss: the prefix's output after its last keys and values is thrown away."""


class Pi05Module(nn.Module):
    """A `PI05Policy` that takes batches as `batch.py` describes them."""

    def __init__(self, policy: PI05Policy, spec: PolicySpec, binding: Binding) -> None:
        super().__init__()
        self.policy = policy
        delivered = {target for _, target in binding.cameras}
        self.cameras = tuple(camera for camera in spec.cameras if camera in delivered)
        self.missing_cameras = len(binding.missing_cameras)
        self.action_dim = binding.action_dim

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        images, image_masks = self._images(batch)
        losses_BTP = self.policy.model.forward(
            images,
            image_masks,
            batch[TOKENS],
            batch[TOKEN_MASK],
            batch[ACTION],
            batch[NOISE][:, 0],
            batch[TIME][:, 0],
        )
        return losses_BTP[:, :, : self.action_dim].mean()

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor], noise_BTP: Tensor) -> Tensor:
        images, image_masks = self._images(batch)
        actions_BTP = self.policy.model.sample_actions(
            images, image_masks, batch[TOKENS], batch[TOKEN_MASK], noise=noise_BTP
        )
        return actions_BTP[:, :, : self.action_dim]

    def _images(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """uint8 -> [-1, 1], in LeRobot's order of operations; cameras without data are -1 and masked."""
        images = [batch[camera].to(torch.float32) / 255.0 * 2.0 - 1.0 for camera in self.cameras]
        there = torch.ones(images[0].shape[0], dtype=torch.bool, device=images[0].device)
        masks = [there] * len(images)
        for _ in range(self.missing_cameras):
            images.append(torch.full_like(images[0], -1.0))
            masks.append(torch.zeros_like(there))
        return images, masks


def load_pi05(spec: PolicySpec, binding: Binding, *, train: str, dtype: str | None) -> Pi05Module:
    """The policy of a pretrained_model folder, on the CPU, with what `train` names trainable and the rest frozen."""
    folder = Path(spec.folder)
    config = PreTrainedConfig.from_pretrained(folder, local_files_only=True)
    assert isinstance(config, PI05Config)  # read_spec has checked the type
    config.device = "cpu"
    config.dtype = dtype or config.dtype
    size = read_size(folder)
    with building_at(size) if size is not None else nullcontext():
        policy = PI05Policy(config)
    load_weights(policy, folder)
    set_trainable(policy, train)
    return Pi05Module(policy, spec, binding)


def load_weights(policy: PI05Policy, folder: Path) -> None:
    """Load every tensor or fail with the list of those that did not fit."""
    stored = _renamed_by_lerobot(policy, _read_tensors(folder))
    stored = {key if key.startswith("model.") else f"model.{key}": value for key, value in stored.items()}
    wanted = policy.state_dict()
    missing = _untied(wanted, [key for key in wanted if key not in stored], stored)
    unexpected = [key for key in stored if key not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"policy '{folder}': the weights do not fit the model: {len(missing)} missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}; is it a PI0.5 base of another size or version?"
        )
    try:
        policy.load_state_dict(stored, strict=False)
    except RuntimeError as error:
        raise ValueError(f"policy '{folder}': {str(error).splitlines()[-1].strip()}") from error


def _renamed_by_lerobot(policy: PI05Policy, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """LeRobot's own mapping of older names, without its warnings: what does not fit is an error below."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        return policy._fix_pytorch_state_dict_keys(tensors, policy.config)
    finally:
        root.setLevel(level)


def set_trainable(policy: PI05Policy, train: str) -> None:
    """Freeze by name. What cannot get a gradient is frozen too, so that DDP need not search for it."""
    wanted = re.compile(TRAINED[train])
    last = len(policy.model.paligemma_with_expert.paligemma.model.language_model.layers) - 1
    unused = re.compile(UNUSED.replace("{last}", str(last)))
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(bool(wanted.match(name)) and not unused.search(name))


def _untied(wanted: Mapping[str, Tensor], missing: list[str], stored: Mapping[str, Tensor]) -> list[str]:
    """Missing keys that are not another name of a tensor that is stored (LeRobot saves shared tensors once)."""
    loaded = {wanted[key].data_ptr() for key in stored if key in wanted}
    return [key for key in missing if wanted[key].data_ptr() not in loaded]


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_bytes())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            tensors |= load_file(folder / name)
        except FileNotFoundError as error:
            raise ValueError(f"policy '{folder}': {name} is missing; fetch the base model anew") from error
        except SafetensorError as error:
            raise ValueError(f"policy '{folder}': {name} is damaged ({error}); fetch the base model anew") from error
    return tensors
