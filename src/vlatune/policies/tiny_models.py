"""Parts of tiny models: a tokenizer for a few tasks, and weight initialisation.

A tiny model uses LeRobot's classes and trains on a CPU in minutes, for the demo and tests. It needs
no downloads.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.processor import (
    TokenizerProcessorStep,
    make_default_policy_processor_steps,
    make_policy_processor_pipelines,
)
from lerobot.utils.constants import ACTION, OBS_STATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from vlatune.policies.base import Fit
from vlatune.policies.model_size import ModelSize, write_size
from vlatune.policies.tokenizer import MAX_LENGTH
from vlatune.storage.files import atomic_folder

TOKENIZER_FOLDER = "tokenizer"
DEPTH = 2  # SmolVLA has one layer with self-attention, one with cross-attention
ATTENTION_GAIN = 1.25  # for queries and keys, so that attention is not uniform at the start
NUM_WAVES = 3  # cosines per axis in a patch filter


def train_tokenizer(prompts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with one token per word of `prompts`, and bytes for other text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2**16,  # never reached: training ends when every word is one token
        min_frequency=1,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prompts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="right"
    )


def tiny_size[S: ModelSize](size_class: type[S], tokenizer: PreTrainedTokenizerFast, fit: Fit, **more: int) -> S:
    """Return a size with one token per image, which sees every pixel and learns positions fast."""
    shared = dict.fromkeys(("width", "vision_width"), 96) | dict.fromkeys(("mlp_dim", "vision_mlp_dim"), 192)
    heads = {"head_dim": 32, "vision_heads": 4, "depth": DEPTH, "vision_depth": 1}
    return size_class(**shared, **heads, patch_size=fit.image_size, vocab_size=round_up(len(tokenizer), 64), **more)


def fitted(fit: Fit, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> dict[str, Any]:
    """Return the fields of LeRobot's config that the datasets and the run determine."""
    images = {camera: PolicyFeature(FeatureType.VISUAL, (3, fit.image_size, fit.image_size)) for camera in fit.cameras}
    horizon = fit.overrides.get("chunk_size", fit.horizon)
    longest = max(len(tokenizer.encode(prompt)) for prompt in prompts)
    return {
        "input_features": images | {OBS_STATE: PolicyFeature(FeatureType.STATE, (fit.state_dim,))},
        "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (fit.action_dim,))},
        "chunk_size": horizon,
        "n_action_steps": horizon,
        "tokenizer_max_length": fit.overrides.get(MAX_LENGTH, round_up(longest, 8)),
        "device": "cpu",
        "push_to_hub": False,
    }


def write_base(
    folder: Path,
    policy: Any,
    size: ModelSize,
    tokenizer: PreTrainedTokenizerFast,
    make_processors: Callable[[Any, TokenizerProcessorStep, Any], Iterable[Any]],
    *,
    place: Path | None = None,
) -> Path:
    """Write the base model's folder atomically and return it.

    `make_processors` takes its config, the tokenizer step and LeRobot's default steps. `place` is the final location, if
    different: LeRobot's processor stores the absolute path of the tokenizer.
    """
    with atomic_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary / TOKENIZER_FOLDER)
        policy.save_pretrained(temporary)
        write_size(temporary, size)
        tokenize = TokenizerProcessorStep(
            tokenizer_name=str(temporary / TOKENIZER_FOLDER),
            max_length=policy.config.tokenizer_max_length,
            padding_side="right",
            padding=getattr(policy.config, "pad_language_to", "max_length"),
        )
        tokenize.tokenizer_name = str((place or folder).resolve() / TOKENIZER_FOLDER)
        steps = make_default_policy_processor_steps(policy.config)
        for pipeline in make_policy_processor_pipelines(*make_processors(policy.config, tokenize, steps)):
            pipeline.save_pretrained(temporary)
    return folder


def init_layers(layers: Iterable[Any]) -> None:
    """Initialise decoder layers: outputs at the scale of the inputs, and non-uniform attention."""
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            init_gain(linear)
        for linear in (attention.q_proj, attention.k_proj):
            init_gain(linear, gain=ATTENTION_GAIN)


def init_patches(embeddings: Any) -> None:
    """Initialise a vision tower with smooth patch filters and a position code."""
    patches, places = embeddings.patch_embedding.weight, embeddings.position_embedding.weight
    patches.data.copy_(smooth_filters(*patches.shape))
    places.data.copy_(place_code(*places.shape))


def init_gain(linear: nn.Linear, gain: float = 1.0) -> None:
    """Initialise so that inputs of unit variance give outputs of standard deviation `gain`."""
    nn.init.normal_(linear.weight, std=gain * linear.in_features**-0.5)


def pass_actions(model: Any) -> int:
    """Let the action-time MLP pass the action through: silu(x) - silu(-x) is x.

    The first hidden units, two per action dim, carry the action, the others only see the time. Returns the number of
    the former; the caller sets the output weights of the latter.
    """
    mlp_in, mlp_out, action_WP = model.action_time_mlp_in, model.action_time_mlp_out, model.action_in_proj.weight.data
    width, dims = action_WP.shape
    for linear in (mlp_in, mlp_out):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    mlp_in.weight.data[:dims, :width] = action_WP.T
    mlp_in.weight.data[dims : 2 * dims, :width] = -action_WP.T
    # Half of the time code is near 0 or 1.
    nn.init.normal_(mlp_in.weight.data[2 * dims :, width:], std=(2 / width) ** 0.5)
    mlp_out.weight.data[:, :dims] = action_WP
    mlp_out.weight.data[:, dims : 2 * dims] = -action_WP
    return 2 * dims


def smooth_filters(num_filters: int, num_channels: int, height: int, width: int) -> torch.Tensor:
    """Return random mixtures of low-frequency cosines, which respond to colour and position."""
    waves_KHW = [
        torch.outer(_cosine(row_turns, height), _cosine(column_turns, width))
        for row_turns in range(NUM_WAVES)
        for column_turns in range(NUM_WAVES)
    ]
    mixture = torch.randn(num_filters, num_channels, len(waves_KHW))
    filters = torch.einsum("fck,khw->fchw", mixture, torch.stack(waves_KHW))
    return filters / filters.flatten(1).norm(dim=1)[:, None, None, None]


def place_code(num_places: int, width: int) -> torch.Tensor:
    """Return sines and cosines of row and column with rising frequency, in half turns per image."""
    side = math.isqrt(num_places)
    if side * side != num_places or width % 4:
        raise ValueError(
            f"place code: {num_places} image tokens and width {width}; needs a square number and a multiple of 4"
        )
    centre = (torch.arange(side) + 0.5) / side - 0.5
    turns = torch.arange(width // 4) % side * 0.5 + 0.5
    angle = 2 * math.pi * centre[:, None] * turns
    code = torch.cat([angle.sin(), angle.cos()], dim=1)
    rows = code[:, None].expand(side, side, -1)
    columns = code[None, :].expand(side, side, -1)
    return 0.5 * torch.cat([rows, columns], dim=2).reshape(num_places, width)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _cosine(half_turns: int, length: int) -> torch.Tensor:
    return torch.cos(math.pi * half_turns * (torch.arange(length) + 0.5) / length)
