"""PI0.5, the torch side: LeRobot's own modules and weights behind `forward(batch) -> loss`. PI0's is derived from it.

The forward is the one of `forward.py`, in place of `PI05Policy.forward`, which runs backward
through a frozen prefix and waits for the device several times a step. Sampling actions is LeRobot's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlatune.batch import ACTION, ACTION_DIM_MASK, CAMERA_MASK, NOISE, TIME, TOKEN_MASK, TOKENS
from vlatune.policies.base import Binding, LossParts, ModuleOptions, PolicySpec
from vlatune.policies.flow_matching import mean_over_own_dims
from vlatune.policies.modeling import (
    check_draws,
    how_to_run,
    make_time_scale,
    merge_adapters,
    repeat_each,
    to_pixels,
)
from vlatune.policies.pi05.forward import EmbedSuffix, compute_prefix, embed_actions, flow_losses
from vlatune.policies.pi05.layers import expert_layer, prefix_layer
from vlatune.policies.pi05.load import PiPolicy, load_policy, make_whole, plan_policy
from vlatune.policies.pi05.trainable import TRAIN_PREFIX, add_adapters, set_trainable, trains_tower


class Pi05Module(nn.Module):
    """A `PI05Policy` that takes batches as `batch.py` describes them."""

    time_scale: Tensor
    loss_parts: LossParts | None = None

    def __init__(self, policy: PiPolicy, spec: PolicySpec, binding: Binding, options: ModuleOptions) -> None:
        super().__init__()
        self.policy = policy
        self.base = Path(spec.folder)
        delivered = {target for _, target in binding.cameras}
        self.cameras = tuple(camera for camera in spec.cameras if camera in delivered)
        self.missing_cameras = len(binding.missing_cameras)
        self.action_dim = binding.action_dim
        self.flow_samples = options.flow_samples
        self.dtype = torch.bfloat16 if policy.config.dtype == "bfloat16" else torch.float32
        self.train_prefix = options.train in TRAIN_PREFIX
        self.register_buffer(
            "time_scale", make_time_scale(policy.config, policy.model.action_in_proj), persistent=False
        )
        again = options.gradient_checkpointing
        self._prefix_layer = how_to_run(
            prefix_layer, compiled=options.compile, checkpointed=again and self.train_prefix
        )
        self._expert_layer = how_to_run(expert_layer, compiled=options.compile, checkpointed=again)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean over samples, draws, time steps and the dataset's action dims; of several robots over each sample's own, (B,)."""
        if self.training:  # evaluation takes one, however many training does
            check_draws(batch[NOISE], batch[TIME], self.flow_samples)
        model = self.policy.model
        with torch.set_grad_enabled(self.train_prefix and torch.is_grad_enabled()):
            prefix = compute_prefix(
                model,
                [batch[camera] for camera in self.cameras],
                batch[TOKENS],
                batch[TOKEN_MASK],
                dtype=self.dtype,
                run_layer=self._prefix_layer,
                camera_mask_BC=batch.get(CAMERA_MASK),
            )
        losses_BTP = flow_losses(
            model,
            prefix,
            batch[ACTION],
            batch[NOISE],
            batch[TIME],
            time_scale=self.time_scale,
            embed=self.embedding(batch),
            run_layer=self._expert_layer,
        )
        losses_BTA, own_BP = losses_BTP[:, :, : self.action_dim], batch.get(ACTION_DIM_MASK)
        if own_BP is None:
            self.loss_parts = LossParts(losses_BTA.detach())
            return losses_BTA.mean()
        own_BA = repeat_each(own_BP[:, : self.action_dim], batch[TIME].shape[1])
        self.loss_parts = LossParts(losses_BTA.detach(), counted=own_BA[:, None])
        return mean_over_own_dims(losses_BTP, own_BP)

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor], noise_BTP: Tensor) -> Tensor:
        actions_BTP = self.policy.model.sample_actions(*self.observation(batch), noise=noise_BTP)
        return actions_BTP[:, :, : self.action_dim]

    def embedding(self, batch: Mapping[str, Tensor]) -> EmbedSuffix:
        """How noisy actions become the expert's tokens."""
        return embed_actions

    def observation(self, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """What LeRobot's `sample_actions` takes."""
        return (*self._images(batch), batch[TOKENS], batch[TOKEN_MASK])

    def as_lerobot(self) -> PiPolicy:
        """The policy in LeRobot's own form, for saving: adapters are folded in for good, so train no more afterwards.

        What no step uses is read from the base's files again.
        """
        merge_adapters(self.policy)
        make_whole(self.policy, self.base)
        _put_head_before_embedding(self.policy)
        return self.policy

    def _images(self, batch: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Cameras without data are -1 and masked."""
        images = [to_pixels(batch[camera]) for camera in self.cameras]
        there = torch.ones(images[0].shape[0], dtype=torch.bool, device=images[0].device)
        masks = [there] * len(images)
        if CAMERA_MASK in batch:
            masks = list(batch[CAMERA_MASK].unbind(dim=1))
        for _ in range(self.missing_cameras):
            images.append(torch.full_like(images[0], -1.0))
            masks.append(torch.zeros_like(there))
        return images, masks


def load_pi05(
    spec: PolicySpec,
    binding: Binding,
    options: ModuleOptions,
    device: torch.device | str = "cpu",
    *,
    module: type[Pi05Module] = Pi05Module,
) -> Pi05Module:
    """The policy of a pretrained_model folder, on `device`, with what `options.train` names trainable, the rest frozen.

    On the meta device it has shapes and no values, and no weight is read.
    """
    folder, is_planned = Path(spec.folder), torch.device(device).type == "meta"
    if is_planned:
        policy = plan_policy(folder, train=options.train, dtype=options.dtype, lean=True)
    else:
        policy = load_policy(folder, train=options.train, dtype=options.dtype, device=device, lean=True)
    for name, value in spec.overrides.items():  # none of them changes a weight
        setattr(policy.config, name, value)
    if options.train == "lora":
        add_adapters(policy, rank=options.lora_rank, alpha=options.lora_alpha)
        set_trainable(policy, options.train)
    if options.gradient_checkpointing and trains_tower(options.train):
        tower = policy.model.paligemma_with_expert.paligemma.model.vision_tower
        # As in `how_to_run`: nothing is random, and keeping the generator's state would wait for the device.
        tower.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    made = module(policy, spec, binding, options)
    return made.to("meta") if is_planned else made


def _put_head_before_embedding(policy: PiPolicy) -> None:
    """LeRobot's loader copies the head over the token embedding where it meets it later in the file.

    safetensors sorts by dtype, then by name: in one dtype the head comes first, and the embedding stays what it is.
    """
    paligemma = policy.model.paligemma_with_expert.paligemma
    paligemma.lm_head.to(paligemma.model.language_model.embed_tokens.weight.dtype)
