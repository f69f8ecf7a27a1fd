"""Torch code shared by several policies: linear layers, LoRA, checkpointing and flow matching.

Shapes: B batch, N tokens, D width, K noise samples per observation, T time steps of a chunk, P
padded action dims.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vlatune.batch import (
    ACTION_IS_PAD,
    CAMERA_MASK,
    NOISE,
    PREFIX,
    STATE,
    STEP_ACTIONS,
    TIME,
    TOKEN_MASK,
    TOKENS,
)
from vlatune.data.transforms import NORMALISE_EPS
from vlatune.policies.base import Binding, ModuleOptions, PolicySpec, Stats
from vlatune.policies.loading import fill, find_tensors, put, read_tensors, train_only
from vlatune.policies.normalisation import STATS_OF_MODE

ADAPTER = "default"
"""Name of the single PEFT adapter of a layer."""


class KeyValue(NamedTuple):
    """Keys and values to attend to, (B, key/value heads, S, head size) each."""

    keys: Tensor
    values: Tensor

    def followed_by(self, other: "KeyValue") -> "KeyValue":
        return KeyValue(torch.cat([self.keys, other.keys], dim=2), torch.cat([self.values, other.values], dim=2))

    def repeated(self, times: int) -> "KeyValue":
        """Repeat every observation `times` times, for its noise samples."""
        return KeyValue(repeat_each(self.keys, times), repeat_each(self.values, times))

    def expanded(self, heads: int) -> "KeyValue":
        """Repeat keys and values for each of the query heads that share them."""
        times = heads // self.keys.shape[1]
        return KeyValue(self.keys.repeat_interleave(times, dim=1), self.values.repeat_interleave(times, dim=1))


def pack_layers(layers: Sequence[KeyValue]) -> Tensor:
    """Return the keys and values of all layers as one vector per token, (B, S, layers * 2 * heads * size)."""
    both = torch.stack([torch.stack(layer) for layer in layers])
    return both.permute(2, 4, 0, 1, 3, 5).flatten(2)


def unpack_layers(packed_BSW: Tensor, num_layers: int, head_size: int) -> list[KeyValue]:
    """Return views of what `pack_layers` packed."""
    split = packed_BSW.unflatten(2, (num_layers, 2, -1, head_size)).permute(2, 3, 0, 4, 1, 5)
    return [KeyValue(keys, values) for keys, values in split]


class Rope(NamedTuple):
    """Cosines and sines of rotary embeddings, (B, 1, N, head size or half of it) each."""

    cos: Tensor
    sin: Tensor


class Prefix(NamedTuple):
    """Keys and values of images and prompt by layer."""

    layers: Sequence[KeyValue]
    valid_BS: Tensor
    """False for padding tokens, and for cameras that a sample's robot lacks."""


def project(linear: Any, x: Tensor) -> Tensor:
    """Apply a linear layer without bias in the dtype of `x`.

    LoRA is computed in the same dtype: PEFT's forward would keep a float32 copy of `x` per layer.
    """
    adapted = hasattr(linear, "lora_A")
    weight = linear.base_layer.weight if adapted else linear.weight
    out = functional.linear(x, weight.to(x.dtype))
    if not adapted:
        return out
    low = functional.linear(x, linear.lora_A[ADAPTER].weight.to(x.dtype))
    added, scaling = functional.linear(low, linear.lora_B[ADAPTER].weight.to(x.dtype)), linear.scaling[ADAPTER]
    return out + (added if scaling == 1.0 else added * scaling)  # a product with 1.0 costs a pass over the output


def gated_mlp(mlp: Any, x_BND: Tensor) -> Tensor:
    """Apply the gated MLP of Gemma and Llama."""
    return project(mlp.down_proj, mlp.act_fn(project(mlp.gate_proj, x_BND)) * project(mlp.up_proj, x_BND))


MASK_ALIGNMENT = 16
"""Rows of a mask start at multiples of this many elements, which fused kernels require."""


def expands_heads(device: torch.device) -> bool:
    """True if query heads are not folded into tokens: deterministic kernels compute the gradients of a head in sequence."""
    return torch.are_deterministic_algorithms_enabled() and torch.is_grad_enabled() and device.type != "cpu"


def make_mask(seen_BNS: Tensor, dtype: torch.dtype, groups: int = 1) -> Tensor:
    """Return the mask for `attend` from what tokens attend to, (B, 1, S) if it is the same for all.

    It is additive and aligned, otherwise `scaled_dot_product_attention` converts and copies it in
    every layer. `groups` is the number of query heads per key/value head.
    """
    if seen_BNS.shape[1] > 1 and not expands_heads(seen_BNS.device):
        seen_BNS = seen_BNS.repeat(1, groups, 1)
    *rows, size = seen_BNS.shape
    aligned = torch.zeros(*rows, -(-size // MASK_ALIGNMENT) * MASK_ALIGNMENT, dtype=dtype, device=seen_BNS.device)
    return aligned[..., :size].masked_fill_(~seen_BNS, -math.inf)[:, None]


def attend(queries_BHNE: Tensor, seen: KeyValue, mask: Tensor, scale: float | None = None) -> Tensor:
    """Return the heads' outputs, (B, N, H * E).

    Keys are not repeated: noise samples of an observation, and query heads that share a key/value
    head, are folded into tokens.
    """
    tokens, size = queries_BHNE.shape[2:]
    if expands_heads(queries_BHNE.device):
        seen = seen.expanded(queries_BHNE.shape[1])
    batch, kv_heads = seen.keys.shape[:2]
    samples, groups = len(queries_BHNE) // batch, queries_BHNE.shape[1] // kv_heads
    apart = queries_BHNE.reshape(batch, samples, kv_heads, groups * tokens, size)
    folded = apart.transpose(1, 2).reshape(batch, kv_heads, samples * groups * tokens, size)
    out = functional.scaled_dot_product_attention(folded, seen.keys, seen.values, attn_mask=mask, scale=scale)
    out = out.reshape(batch, kv_heads, samples, groups, tokens, size).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(batch * samples, tokens, kv_heads * groups * size)


def num_valid(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the number of valid actions a masked loss divides by: STEP_ACTIONS, or the batch's."""
    step_B = batch.get(STEP_ACTIONS)
    return (~batch[ACTION_IS_PAD]).sum().clamp_min(1) if step_B is None else step_B[0]


def image_scale(spec: PolicySpec, stats: Stats) -> tuple[Tensor, Tensor]:
    """Return mean and divisor of images in [0, 1], (V, 3, 1, 1) each for V cameras, as in LeRobot."""
    mode = spec.normalisation.get("VISUAL", "IDENTITY")
    if mode == "IDENTITY" or not stats:  # no statistics: an export, which computes nothing
        return torch.zeros(len(spec.cameras), 3, 1, 1), torch.ones(len(spec.cameras), 3, 1, 1)
    mean, deviation = (
        torch.stack([torch.from_numpy(stats[camera][name]).float().reshape(3, 1, 1) for camera in spec.cameras])
        for name in STATS_OF_MODE[mode]
    )
    return mean, deviation + float(NORMALISE_EPS)


class ImageModule(nn.Module):
    """A policy of LeRobot without a prompt, which normalises images on the device."""

    image_mean_V311: Tensor
    image_std_V311: Tensor

    def __init__(self, policy: Any, spec: PolicySpec, stats: Stats) -> None:
        super().__init__()
        self.policy, self.cameras = policy, spec.cameras
        mean, deviation = image_scale(spec, stats)
        self.register_buffer("image_mean_V311", mean, persistent=False)
        self.register_buffer("image_std_V311", deviation, persistent=False)

    def as_lerobot(self) -> Any:
        """Return the policy for saving; LeRobot restores what was changed from the config."""
        return self.policy


LARGEST_KERNEL = 16
"""Largest patch side in pixels for which a convolution is as fast as a matrix product."""
LONGEST_SUM = 2304
"""Longest inner dimension of one matrix product whose result is independent of the thread count."""


class PatchProduct(nn.Conv2d):
    """A patch embedding computed as matrix products, since patches do not overlap.

    Convolution kernels are slow for large windows. The sum is split into groups of at most
    LONGEST_SUM products so that the result does not depend on the number of threads.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        side = self.kernel_size[0]
        height, width = (pixels // side for pixels in input.shape[2:])
        cropped = input[:, :, : height * side, : width * side]  # drop pixels that fill no patch
        patches_NK = functional.pixel_unshuffle(cropped, side).permute(0, 2, 3, 1).flatten(0, 2)
        weight_DK = self.weight.flatten(1)
        size = patches_NK.shape[1]
        groups = next(n for n in range(-(-size // LONGEST_SUM), size + 1) if size % n == 0)
        patches_GNk = patches_NK.unflatten(1, (groups, -1)).transpose(0, 1)
        out_ND = torch.bmm(patches_GNk, weight_DK.unflatten(1, (groups, -1)).permute(1, 2, 0)).sum(dim=0)
        if self.bias is not None:
            out_ND = out_ND + self.bias
        return out_ND.view(len(input), height, width, -1).permute(0, 3, 1, 2)


def multiply_large_patches(policy: nn.Module) -> None:
    """Convert patch embeddings larger than LARGEST_KERNEL to `PatchProduct`, in place."""
    for layer in policy.modules():
        if type(layer) is not nn.Conv2d or min(layer.kernel_size) <= LARGEST_KERNEL:
            continue
        is_plain = layer.padding in ("valid", (0, 0)) and layer.dilation == (1, 1) and layer.groups == 1
        if is_plain and layer.kernel_size == layer.stride and len({*layer.kernel_size}) == 1:
            layer.__class__ = PatchProduct


class LayerModule(nn.Module):
    """One of LeRobot's layers with other forwards: `computes[way](layer, ...)`.

    Uses that differ in shapes have separate functions: torch.compile keeps few versions of each. FSDP2 shards LeRobot's layer, which has the weights, and gathers them around its `compute`.
    """

    def __init__(self, layer: nn.Module, *computes: Callable[..., Any], options: ModuleOptions | None = None) -> None:
        super().__init__()
        self.layer: Any = layer
        self._computes = [torch.compile(one) for one in computes] if options and options.compile else computes
        self._checkpointed = options is not None and options.gradient_checkpointing
        self.layer.compute = self._run

    def forward(self, *inputs: Any, way: int = 0) -> Any:
        return self.layer.compute(self._computes[way], *inputs)

    def _run(self, compute: Callable[..., Any], *inputs: Any) -> Any:
        if not (self._checkpointed and torch.is_grad_enabled()):
            return compute(self.layer, *inputs)
        # Nothing here is random, and saving the RNG state would sync with the device.
        return checkpoint(compute, self.layer, *inputs, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def gathered(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Hold the complete weights of modules that FSDP2 shards; others are unchanged."""
    sharded = [one for one in modules if isinstance(one, FSDPModule)]
    for one in sharded:
        one.unshard()
    yield
    for one in sharded:
        one.reshard()


def add_adapters(policy: nn.Module, *, on: str, but: str, rank: int, alpha: float) -> None:
    """Add PEFT's LoRA to the linear layers whose full name matches `on` and does not contain `but`.

    The adapters start without effect, use torch's global generator, and are always float32.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  (peft only divides it by the rank)
        target_modules=on,
        exclude_modules=f".*({but}).*",
    )
    inject_adapter_in_model(config, policy, adapter_name=ADAPTER)
    for name, parameter in policy.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(torch.float32)


def merge_adapters(policy: nn.Module) -> None:
    """Merge every adapter into its layer in float32, which restores LeRobot's module structure."""
    adapted = [(name, module) for name, module in policy.named_modules() if hasattr(module, "lora_A")]
    for name, module in adapted:
        layer: Any = module
        a, b = (part[ADAPTER].weight.detach() for part in (layer.lora_A, layer.lora_B))
        merged = layer.base_layer.weight.detach().to(torch.float32) + layer.scaling[ADAPTER] * (b @ a)
        layer.base_layer.weight = nn.Parameter(merged, requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(policy.get_submodule(owner), leaf, layer.base_layer)


# Flow matching


def noisy_and_target(action_BTP: Tensor, noise_BKTP: Tensor, time_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Return noisy actions and target velocities, (B * K, T, P)."""
    time_BK11 = time_BK[:, :, None, None]
    noisy_BKTP = time_BK11 * noise_BKTP + (1 - time_BK11) * action_BTP[:, None]
    target_BKTP = noise_BKTP - action_BTP[:, None]
    return noisy_BKTP.flatten(0, 1), target_BKTP.flatten(0, 1)


def encode_time(time_B: Tensor, time_scale: Tensor) -> Tensor:
    """Return LeRobot's sinusoidal embedding of the flow time, bit-identical."""
    angle_BD = time_scale[None, :] * time_B[:, None]
    return torch.cat([torch.sin(angle_BD), torch.cos(angle_BD)], dim=1).to(time_B.dtype)


def embed_actions(model: Any, noisy_BTP: Tensor, time_code_BD: Tensor) -> Tensor:
    """Return a token per action, mixed with the flow time, in PI0 and SmolVLA."""
    action_BTD = model.action_in_proj(noisy_BTP)
    both = torch.cat([action_BTD, time_code_BD[:, None].expand_as(action_BTD)], dim=2)
    return model.action_time_mlp_out(functional.silu(model.action_time_mlp_in(both)))


class FlowModule(nn.Module):
    """A flow-matching policy of LeRobot with a vision-language prefix and an action expert.

    Subclasses create `prefix_layers`, `last_prefix_layer` and `expert_layers`.
    """

    trained: ClassVar[Mapping[str, str]]
    """Patterns of the parameters that each fine-tuning mode trains."""
    adapted: ClassVar[str]
    """Pattern of the linear layers that get LoRA, if their output is used."""
    build_policy: ClassVar[Callable[[Any, str | None], Any]]
    """Build LeRobot's class from a spec and a dtype, with parameters on the meta device."""
    set_dtypes: ClassVar[Callable[[Any, ModuleOptions], None]]
    """Drop heads that no forward calls, and set the dtype of every parameter of a policy."""
    unused: ClassVar[Callable[[Any, Any], str]]
    """Return a pattern of a policy's parameters that no mode trains, because they cannot affect the loss."""
    rounded: ClassVar[str] = "(?!)"
    """Pattern of frozen parameters that an export reads from the base again, if they are bfloat16."""
    policy: Any
    time_scale: Tensor
    prefix_layers: nn.ModuleList
    last_prefix_layer: LayerModule
    expert_layers: nn.ModuleList
    head_dim: int

    def __init__(self, policy: Any, spec: PolicySpec, binding: Binding, options: ModuleOptions) -> None:
        super().__init__()
        self.policy = policy
        self.spec = spec
        delivered = {target for _, target in binding.cameras}
        self.cameras = tuple(camera for camera in spec.cameras if camera in delivered)
        self.action_dim = binding.action_dim
        self.flow_samples = options.flow_samples
        dtype = getattr(policy.config, "dtype", options.dtype)
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.train_prefix = options.train not in ("heads", "expert")
        time_scale = make_time_scale(policy.config, policy.model.action_in_proj)
        self.register_buffer("time_scale", time_scale, persistent=False)

    @classmethod
    def load(cls, spec: Any, binding: Binding, options: ModuleOptions, device: torch.device | str = "cpu") -> Self:
        """Load a pretrained_model folder on `device`, one tensor at a time; only `options.train` is trainable.

        On the meta device no weight is read, but dtypes and `requires_grad` are final.
        """
        policy: Any = cls.build_policy(spec, options.dtype)
        device = torch.device(device)
        tensors = None if device.type == "meta" else find_tensors(Path(spec.folder), policy, spec.type)
        vars(policy.config).update(spec.overrides)  # none of them changes a weight
        cls.set_dtypes(policy, options)
        multiply_large_patches(policy)
        unused = cls.unused(policy, spec)
        train_only(policy, cls.trained[options.train], unused=unused)
        if tensors is not None:
            fill(policy, tensors, device)
        if options.train == "lora":
            add_adapters(policy, on=cls.adapted, but=unused, rank=options.lora_rank, alpha=options.lora_alpha)
            train_only(policy, cls.trained[options.train], unused=unused)
        tower = cls.tower(policy)
        if options.gradient_checkpointing and options.train == "full":
            # Nothing here is random, and saving the RNG state would sync with the device.
            tower.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        for layer in tower.encoder.layers if options.compile else ():
            layer.compile()
        module = cls(policy, spec, binding, options)
        return module if tensors is not None else module.to("meta")

    @staticmethod
    def tower(policy: Any) -> Any:
        """Return the vision tower."""
        raise NotImplementedError

    def tower_layers(self) -> Sequence[nn.Module]:
        return self.tower(self.policy).encoder.layers

    def as_lerobot(self) -> Any:
        """Return LeRobot's policy for saving; merges adapters, so training must not continue.

        Weights that no step uses are read from the base model again.
        """
        merge_adapters(self.policy)
        folder, complete = (
            Path(self.spec.folder),
            type(self).build_policy(self.spec, getattr(self.policy.config, "dtype", None)),
        )
        tensors, ours = find_tensors(folder, complete, self.spec.type), dict(self.policy.named_parameters())
        dropped = [name for name, _ in complete.named_parameters() if name not in ours]
        for head in (name.removesuffix(".weight") for name in dropped):
            owner, _, leaf = head.rpartition(".")
            setattr(self.policy.get_submodule(owner), leaf, complete.get_submodule(head).requires_grad_(False))
        again = [name for name, one in ours.items() if one.dtype == torch.bfloat16 and re.match(self.rounded, name)]
        device = self.policy.model.action_in_proj.weight.device
        for name, tensor in read_tensors(tensors, [*dropped, *again]):
            put(self.policy, name, tensor.to(device=device, dtype=complete.get_parameter(name).dtype, copy=True))
        return self.policy

    def layers(self) -> list[LayerModule]:
        """Return the layers of language model and expert, in the order of a forward pass."""
        return [*self.prefix_layers, self.last_prefix_layer, *self.expert_layers]  # pyright: ignore[reportReturnType]

    def embed_prompt(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the embedded prompt tokens, (B, L, D)."""
        raise NotImplementedError

    def encode_images(self, images_BCHW: Tensor) -> Tensor:
        """Return the tokens of images, (B, N, D)."""
        raise NotImplementedError

    def make_rope(self, positions_BN: Tensor) -> Rope:
        raise NotImplementedError

    def check_noise(self, batch: Mapping[str, Tensor]) -> None:
        """Raise if the noise samples of a training batch differ from `flow_samples`."""
        given = (batch[NOISE].shape[1], batch[TIME].shape[1])
        if self.training and given != (self.flow_samples, self.flow_samples):  # evaluation always uses one sample
            raise ValueError(
                f"the batch has {given[0]} noise and {given[1]} time samples per observation, the module was loaded for "
                f"--policy.flow_samples={self.flow_samples}; give `NoiseSpec` the same number"
            )

    def get_prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """Return the prefix that was kept of images and prompt, or compute it."""
        if PREFIX in batch:
            kept_BSW, mask_BL = batch[PREFIX], batch[TOKEN_MASK]
            valid_BS = valid_tokens(mask_BL, batch.get(CAMERA_MASK), kept_BSW.shape[1] - mask_BL.shape[1])
            return Prefix(unpack_layers(kept_BSW, len(self.prefix_layers) + 1, self.head_dim), valid_BS)
        with torch.set_grad_enabled(self.train_prefix and torch.is_grad_enabled()):
            return self.compute_prefix(batch)

    @torch.no_grad()
    def compute_kept(self, batch: Mapping[str, Tensor]) -> Tensor:
        return pack_layers(self.compute_prefix(batch).layers)

    def compute_prefix(self, batch: Mapping[str, Tensor]) -> Prefix:
        """Encode the images of all cameras in one pass, and compute the prefix with the prompt."""
        images = self.encode_images(torch.cat([batch[camera] for camera in self.cameras])).chunk(len(self.cameras))
        hidden_BND = torch.cat([*images, self.embed_prompt(batch)], dim=1)
        num_image_tokens = hidden_BND.shape[1] - batch[TOKENS].shape[1]
        valid_BN = valid_tokens(batch[TOKEN_MASK], batch.get(CAMERA_MASK), num_image_tokens)
        rope = self.make_rope(torch.cumsum(valid_BN, dim=1) - 1)
        layers, mask = [], make_mask(valid_BN[:, None], hidden_BND.dtype)
        for layer in self.prefix_layers:
            hidden_BND, key_value = layer(hidden_BND, rope, mask)
            layers.append(key_value)
        return Prefix([*layers, self.last_prefix_layer(hidden_BND, rope)], valid_BN)

    @torch.no_grad()
    def predict(self, batch: Mapping[str, Tensor], noise_BTP: Tensor) -> Tensor:
        actions_BTP = self.policy.model.sample_actions(*self.observation(batch), noise=noise_BTP)
        return actions_BTP[:, :, : self.action_dim]

    def observation(self, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Return the arguments of LeRobot's `sample_actions`, without cameras that it would mask."""
        images = [to_pixels(batch[camera]) for camera in self.cameras]
        present = [torch.ones(len(one), dtype=torch.bool, device=one.device) for one in images]
        if CAMERA_MASK in batch:
            present = list(batch[CAMERA_MASK].unbind(dim=1))
        return images, present, batch[TOKENS], batch[TOKEN_MASK]

    def padded_state(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Pad the state with zeros to the policy's number of dims."""
        return functional.pad(batch[STATE], (0, self.policy.config.max_state_dim - batch[STATE].shape[1]))


def use_fast_kernels(device: torch.device, *, deterministic: bool = False) -> None:
    """Use TF32 and the fastest convolutions on CUDA, in training and in evaluation."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
        torch.backends.cudnn.allow_tf32 = True
        # Images have one size, but benchmarking may choose different kernels each time.
        torch.backends.cudnn.benchmark = not deterministic


def make_time_scale(config: Any, action_in: nn.Linear) -> Tensor:
    """Return radians per unit of flow time in float64, computed once rather than in every step."""
    fraction = torch.linspace(0.0, 1.0, action_in.out_features // 2, dtype=torch.float64)
    period = config.min_period * (config.max_period / config.min_period) ** fraction
    return (1.0 / period * 2 * math.pi).to(action_in.weight.device)


def valid_tokens(token_mask_BL: Tensor, camera_mask_BC: Tensor | None, num_image_tokens: int) -> Tensor:
    """Return the validity of image tokens and prompt tokens, (B, N).

    False for padding, and for cameras that a sample's robot lacks.
    """
    if camera_mask_BC is None:
        seen_BN = token_mask_BL.new_ones(len(token_mask_BL), num_image_tokens)
    else:
        num_cameras = camera_mask_BC.shape[1]
        seen_BN = camera_mask_BC[..., None].expand(-1, -1, num_image_tokens // num_cameras).flatten(1)
    return torch.cat([seen_BN, token_mask_BL], dim=1)


def repeat_each(values: Tensor, times: int) -> Tensor:
    """Repeat every row `times` times, adjacent."""
    return values[:, None].expand(-1, times, *values.shape[1:]).flatten(0, 1)


def to_pixels(images: Tensor) -> Tensor:
    """Convert uint8 to [-1, 1], in LeRobot's order of operations."""
    return images.to(torch.float32) / 255.0 * 2.0 - 1.0
