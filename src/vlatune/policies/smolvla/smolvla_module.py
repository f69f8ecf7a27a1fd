"""SmolVLA, the torch side: a folder -> LeRobot's own modules and weights, behind `forward(batch) -> loss`.

The forward is the one of `smolvla_forward.py`, in place of `SmolVLAPolicy.forward`, which runs backward through a frozen
vision-language model and waits for the device several times a step. Sampling actions is LeRobot's. What trains is what
LeRobot's own flags would train (WAYS), and is float32; the rest has the dtype that is asked for. The head over the
vocabulary, which nothing calls, is not loaded; an export has it from the base's files.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.smolvla import SmolVLAConfig, SmolVLAPolicy
from torch import Tensor, nn
from torch.nn import functional

from vlatune.batch import (
    ACTION,
    ACTION_DIM_MASK,
    ACTION_IS_PAD,
    CAMERA_MASK,
    DATASET,
    NOISE,
    STATE,
    TIME,
    TOKEN_MASK,
    TOKENS,
)
from vlatune.policies.base import Binding, LossParts, ModuleOptions
from vlatune.policies.flow_matching import mean_over_own_dims
from vlatune.policies.loading import decode_config, fill, parameters_on_meta, put, read_tensors, round_input
from vlatune.policies.modeling import (
    ADAPTER,
    add_adapters,
    check_draws,
    encode_time,
    how_to_run,
    make_time_scale,
    merge_adapters,
    multiply_large_patches,
    noisy_and_wanted,
    repeat_each,
    to_pixels,
)
from vlatune.policies.smolvla.smolvla_forward import (
    add_state,
    connect,
    cross_layer,
    look,
    make_places,
    make_wavelengths,
    own_layer,
    run_tower,
    to_bits,
    velocity,
)
from vlatune.policies.smolvla.smolvla_size import (
    CONNECTOR_PART,
    KEPT_PART,
    TOWER_PART,
    VLM,
    SmolVLASize,
    SmolVLASpec,
    building_at,
    find_tensors,
)

STATE_PROJECTION = r"model\.state_proj\."
HEADS = r"model\.(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out)\."
EXPERT = r"model\.vlm_with_expert\.lm_expert\."
TOWER = r"model\.vlm_with_expert\.vlm\.model\.vision_model\."
WAYS = {
    "heads": HEADS,
    "expert": f"{HEADS}|{EXPERT}",
    "lora": rf"{HEADS}|.*\.lora_(A|B)\.{ADAPTER}\.",
    "language": rf"(?!{TOWER})model\.",
    "full": r"model\.",
}
"""What each way trains. LeRobot's flags for it: expert is train_expert_only, language is freeze_vision_encoder without it, full
is neither of them."""
TRAIN_PREFIX = ("lora", "language", "full")
"""Ways that train something of the vision-language model, which then needs gradients."""
ADAPTED = r".*\.(text_model|lm_expert)\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
SMALLEST_SHARE = 1e-6
"""Of a chunk inside its episode, where none of it is: its loss is 0 all the same."""
LM_HEAD = "model.vlm_with_expert.vlm.lm_head.weight"


class SmolVLAModule(nn.Module):
    """A `SmolVLAPolicy` that takes batches as `batch.py` describes them."""

    time_scale: Tensor
    wavelengths: Tensor
    places: Tensor
    loss_parts: LossParts | None = None

    def __init__(self, policy: SmolVLAPolicy, spec: SmolVLASpec, binding: Binding, options: ModuleOptions) -> None:
        super().__init__()
        self.policy, self.base = policy, Path(spec.folder)
        size = self.size = spec.size
        delivered = {target for _, target in binding.cameras}
        self.cameras = tuple(camera for camera in spec.cameras if camera in delivered)
        self.action_dim, self.num_datasets = binding.action_dim, len(binding.parts)
        self.flow_samples = options.flow_samples
        self.dtype = _computing_dtype(options)
        self.train_prefix, self.kept_part = options.train in TRAIN_PREFIX, KEPT_PART.get(options.train)
        action_in, device = policy.model.action_in_proj, policy.model.action_in_proj.weight.device
        places = _places(spec)
        self.register_buffer("time_scale", make_time_scale(policy.config, action_in), persistent=False)
        self.register_buffer("wavelengths", make_wavelengths(size.vlm.head_dim).to(device), persistent=False)
        self.register_buffer("places", places.to(device), persistent=False)
        again = options.gradient_checkpointing
        self._prefix_layer = how_to_run(own_layer, compiled=options.compile, checkpointed=again and self.train_prefix)
        self._own_layer = how_to_run(own_layer, compiled=options.compile, checkpointed=again)
        self._cross_layer = how_to_run(cross_layer, compiled=options.compile, checkpointed=again)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean over the dataset's action dims and all time steps that lie inside their episode, of samples and draws.

        In evaluation, as LeRobot has it for single samples, the mean of the samples' own: it is the same for every batch size.
        Of several robots that of each sample, (B,), over the dims of its own.
        """
        if self.training:  # evaluation takes one, however many training does
            check_draws(batch[NOISE], batch[TIME], self.flow_samples)
        noisy, wanted = noisy_and_wanted(batch[ACTION], batch[NOISE], batch[TIME])
        guessed = velocity(
            self.policy.model,
            self._observe(batch),
            noisy,
            encode_time(batch[TIME].flatten(), self.time_scale),
            size=self.size,
            wavelengths=self.wavelengths,
            run_own=self._own_layer,
            run_cross=self._cross_layer,
        )
        losses_MTP = functional.mse_loss(wanted, guessed, reduction="none")
        inside = repeat_each(~batch[ACTION_IS_PAD], batch[NOISE].shape[1])
        losses, counted, own_BP = losses_MTP[:, :, : self.action_dim], inside[:, :, None], batch.get(ACTION_DIM_MASK)
        if own_BP is not None:
            counted = counted * repeat_each(own_BP[:, : self.action_dim], batch[NOISE].shape[1])[:, None]
        self.loss_parts = LossParts(losses.detach(), counted=counted)
        if own_BP is not None:
            return self._by_sample(losses_MTP * inside[:, :, None], batch)
        sums, counts = (losses * inside[:, :, None]).sum(dim=(1, 2)), inside.sum(dim=1) * self.action_dim
        if self.training:
            return sums.sum() / counts.sum().clamp_min(1)
        return (sums / counts.clamp_min(1)).mean()

    def _by_sample(self, losses_MTP: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """(B,): each sample's mean over its draws, its robot's dims and the time steps inside its episode.

        In training a sample counts by its time steps there, within the samples of its dataset: the mean of a dataset's is what
        LeRobot's loss would be on them alone.
        """
        share_B, dataset_B = (~batch[ACTION_IS_PAD]).to(losses_MTP.dtype).mean(dim=1), batch[DATASET]
        if self.training:
            both_2D = share_B.new_zeros(2, self.num_datasets)
            both_2D.index_add_(1, dataset_B, torch.stack([share_B, torch.ones_like(share_B)]))
            share_B = (both_2D[0] / both_2D[1])[dataset_B]
        return mean_over_own_dims(losses_MTP, batch[ACTION_DIM_MASK]) / share_B.clamp_min(SMALLEST_SHARE)

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor], noise_BTP: Tensor) -> Tensor:
        """Cameras without data are left out: LeRobot masks every token of them."""
        images = [to_pixels(batch[camera]) for camera in self.cameras]
        there = [torch.ones(len(one), dtype=torch.bool, device=one.device) for one in images]
        if CAMERA_MASK in batch:
            there = list(batch[CAMERA_MASK].unbind(dim=1))
        actions_BTP = self.policy.model.sample_actions(
            images, there, batch[TOKENS], batch[TOKEN_MASK], self._state(batch), noise=noise_BTP
        )
        return actions_BTP[:, :, : self.action_dim]

    def as_lerobot(self) -> SmolVLAPolicy:
        """The policy in LeRobot's own form, for saving: adapters are folded in for good, so train no more afterwards.

        What no step uses is read from the base's files again.
        """
        merge_adapters(self.policy)
        make_whole(self.policy, self.base, self.size)
        return self.policy

    def _observe(self, batch: Mapping[str, Tensor]) -> Any:
        model, parts = self.policy.model, {"size": self.size, "wavelengths": self.wavelengths, "dtype": self.dtype}
        with torch.set_grad_enabled(self.train_prefix and torch.is_grad_enabled()):
            seen = look(
                model,
                [batch[camera] for camera in self.cameras],
                batch[TOKENS],
                batch[TOKEN_MASK],
                places_N=self.places,
                run_layer=self._prefix_layer,
                camera_mask_BC=batch.get(CAMERA_MASK),
                kept_part=self.kept_part,
                **parts,
            )
        return add_state(model, seen, self._state(batch), run_layer=self._own_layer, **parts)

    def _state(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Widened with zeros to the policy's number of dims."""
        state_BS = batch[STATE]
        return functional.pad(state_BS, (0, self.size.state_dims - state_BS.shape[1]))


class PictureEncoder(nn.Module):
    """The frozen parts that a picture goes through before anything that trains, alone."""

    places: Tensor

    def __init__(self, vlm: Any, spec: SmolVLASpec, part: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.vision_model, self.connector = vlm.vision_model, vlm.connector if part == CONNECTOR_PART else None
        self.dtype = dtype
        self.register_buffer("places", _places(spec), persistent=False)

    @torch.no_grad()
    def forward(self, images_BCHW: Tensor) -> Tensor:
        hidden_BND = run_tower(self, images_BCHW, self.places)
        return to_bits(hidden_BND if self.connector is None else connect(self, hidden_BND, self.dtype))


def load_picture_encoder(
    spec: SmolVLASpec, options: ModuleOptions, device: torch.device | str = "cpu"
) -> PictureEncoder:
    """Of the weights only these parts are read."""
    vlm: Any = plan_policy(spec, train=options.train, dtype=options.dtype).model.vlm_with_expert.get_vlm_model()
    stored, part = find_tensors(Path(spec.folder), spec.size), KEPT_PART[options.train]
    for name in (TOWER_PART, CONNECTOR_PART)[: 1 if part == TOWER_PART else 2]:
        prefix = f"{VLM}model.{name}."
        own = {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}
        fill(getattr(vlm, name), own, torch.device(device))
    return PictureEncoder(vlm, spec, part, _computing_dtype(options)).to(device).eval()


def load_smolvla(
    spec: SmolVLASpec, binding: Binding, options: ModuleOptions, device: torch.device | str = "cpu"
) -> SmolVLAModule:
    """The policy of a pretrained_model folder, on `device`, with what `options.train` names trainable, the rest frozen."""
    folder, size = Path(spec.folder), spec.size
    policy = plan_policy(spec, train=options.train, dtype=options.dtype)
    fill(policy, find_tensors(folder, size), torch.device(device))
    if options.train == "lora":
        add_adapters(policy, on=ADAPTED, but=_unused(size), rank=options.lora_rank, alpha=options.lora_alpha)
        set_trainable(policy, size, options.train)
    if options.gradient_checkpointing and options.train == "full":
        # As in `how_to_run`: nothing is random, and keeping the generator's state would wait for the device.
        tower = policy.model.vlm_with_expert.get_vlm_model().vision_model
        tower.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return SmolVLAModule(policy, spec, binding, options)


def plan_policy(spec: SmolVLASpec, *, train: str, dtype: str | None) -> SmolVLAPolicy:
    """The policy before it is filled, on the meta device: which tensors, in which dtypes, and what of them trains."""
    policy = build_policy(spec)
    policy.model.vlm_with_expert.vlm.lm_head = None  # pyright: ignore[reportAttributeAccessIssue]
    multiply_large_patches(policy)
    set_trainable(policy, spec.size, train)
    for name, parameter in list(policy.named_parameters()):
        if dtype == "bfloat16" and not _is_float32(name, train):
            put(policy, name, parameter.detach().to(torch.bfloat16))
    # Where the tower is frozen and what comes after it trains, the two have different dtypes.
    policy.model.vlm_with_expert.get_vlm_model().connector.modality_projection.proj.register_forward_pre_hook(
        round_input
    )
    return policy


def build_policy(spec: SmolVLASpec) -> SmolVLAPolicy:
    """LeRobot's own class, its parameters on the meta device: names, shapes and dtypes without memory."""
    config = decode_config(Path(spec.folder), SmolVLAConfig)
    vars(config).update(spec.overrides)  # none of them changes a weight
    config.compile_model = False  # ours to decide, see ModuleOptions
    building = {
        "num_vlm_layers": 0,  # only those that are used are built
        "load_vlm_weights": False,
        "train_expert_only": False,  # `set_trainable` decides
        "freeze_vision_encoder": False,
        "device": None,  # the constructor would move parameters that are not there yet
    }
    stored = {name: getattr(config, name) for name in building} | {"device": "cpu"}
    vars(config).update(building)
    with building_at(replace(spec.size.vlm, depth=spec.size.depth)), parameters_on_meta():
        policy = SmolVLAPolicy(config)
    vars(config).update(stored)
    return policy


def set_trainable(policy: SmolVLAPolicy, size: SmolVLASize, train: str) -> None:
    """Freeze all but what `train` names, and what cannot influence the loss whatever is asked for."""
    wanted, unused = re.compile(WAYS[train]), re.compile(_unused(size))
    held = re.compile(STATE_PROJECTION) if not policy.config.train_state_proj else None
    for name, parameter in policy.named_parameters():
        trains = wanted.match(name) and not unused.search(name) and not (held and held.match(name))
        parameter.requires_grad_(bool(trains))


def make_whole(policy: SmolVLAPolicy, folder: Path, size: SmolVLASize) -> None:
    """With the head over the vocabulary, as LeRobot has it."""
    vlm: Any = policy.model.vlm_with_expert.vlm
    device = policy.model.action_in_proj.weight.device
    ((_, tensor),) = read_tensors(find_tensors(folder, size), [LM_HEAD])
    vlm.lm_head = nn.Linear(size.vlm.width, size.vlm.vocab_size, bias=False, device="meta").requires_grad_(False)
    put(policy, LM_HEAD, tensor.to(device=device, copy=True))


def _computing_dtype(options: ModuleOptions) -> torch.dtype:
    return torch.bfloat16 if options.dtype == "bfloat16" else torch.float32


def _places(spec: SmolVLASpec) -> Tensor:
    size = spec.size.vlm
    return make_places(spec.image_hw, patch_size=size.patch_size, image_size=size.image_size)


def _is_float32(name: str, train: str) -> bool:
    """What trains, and what is unused in the same layers: LeRobot's sampling runs them, and a layer in one dtype."""
    return bool(re.match(f"{WAYS[train]}|{HEADS}", name))


def _unused(size: SmolVLASize) -> str:
    """As LeRobot freezes it: the last layer that the expert looks at is left as it is, and those after it have no effect."""
    last = "|".join(str(layer) for layer in range(size.last_seen, size.depth))
    return rf"\.lm_head\.|\.text_model\.norm\.|\.text_model\.layers\.({last})\."
