"""What small twins are made of: a tokenizer for a handful of sentences, and weights from which training starts well.

A small twin is a policy of LeRobot's own classes that learns on a CPU in minutes, for demo and tests. Nothing is fetched
from a hub for it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.processor import TokenizerProcessorStep
from lerobot.utils.constants import ACTION, OBS_STATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from vlatune.files import whole_folder
from vlatune.policies.base import Fit
from vlatune.policies.model_size import ModelSize, write_size

TOKENIZER_FOLDER = "tokenizer"
ATTENTION_GAIN = 1.25  # of queries and keys each: a head looks at a few tokens, not at all of them alike
NUM_WAVES = 3  # cosines per axis that a patch filter is mixed from


def train_tokenizer(prompts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE that knows every word of `prompts` as one token, and spells the rest in bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2**16,  # never reached: training ends when every word of the prompts is one token
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


def prompt_length(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> int:
    """Tokens of the longest prompt, rounded up to 8: padding costs as much as text."""
    return round_up(max(len(tokenizer.encode(prompt)) for prompt in prompts), 8)


def fitted(fit: Fit) -> dict[str, Any]:
    """What the datasets decide of LeRobot's config."""
    images = {camera: PolicyFeature(FeatureType.VISUAL, (3, fit.image_size, fit.image_size)) for camera in fit.cameras}
    return {
        "input_features": images | {OBS_STATE: PolicyFeature(FeatureType.STATE, (fit.state_dim,))},
        "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (fit.action_dim,))},
        "device": "cpu",
        "push_to_hub": False,
    }


def chunk_of(fit: Fit) -> dict[str, int]:
    """Its length in LeRobot's config: a run's own, or the small twin's."""
    horizon = fit.overrides.get("chunk_size", fit.horizon)
    return {"chunk_size": horizon, "n_action_steps": horizon}


def write_base(
    folder: Path,
    policy: Any,
    size: ModelSize,
    tokenizer: PreTrainedTokenizerFast,
    make_processors: Callable[[Any, TokenizerProcessorStep], Iterable[Any]],
    *,
    padding: str,
    place: Path | None = None,
) -> Path:
    """Write the base model's folder, whole or not at all, and return it; `make_processors` takes its config and the step
    that tokenises.

    `place` is where the folder will lie in the end, if somewhere else: LeRobot's processor names its tokenizer by its path.
    """
    with whole_folder(folder) as aside:
        tokenizer.save_pretrained(aside / TOKENIZER_FOLDER)
        policy.save_pretrained(aside)
        write_size(aside, size)
        tokenize = TokenizerProcessorStep(
            tokenizer_name=str(aside / TOKENIZER_FOLDER),
            max_length=policy.config.tokenizer_max_length,
            padding_side="right",
            padding=padding,
        )
        tokenize.tokenizer_name = str((place or folder).resolve() / TOKENIZER_FOLDER)
        for pipeline in make_processors(policy.config, tokenize):
            pipeline.save_pretrained(aside)
    return folder


def init_layers(layers: Iterable[Any]) -> None:
    """Of a decoder: each adds at the scale of what is there; attention tells tokens apart at once."""
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            init_gain(linear)
        for linear in (attention.q_proj, attention.k_proj):
            init_gain(linear, gain=ATTENTION_GAIN)


def init_patches(embeddings: Any) -> None:
    """Of a vision tower: filters that see where colours lie, and image tokens that know their place."""
    patches, places = embeddings.patch_embedding.weight, embeddings.position_embedding.weight
    patches.data.copy_(smooth_filters(*patches.shape))
    places.data.copy_(place_code(*places.shape))


def init_gain(linear: nn.Linear, gain: float = 1.0) -> None:
    """Inputs of unit variance give outputs of standard deviation `gain`."""
    nn.init.normal_(linear.weight, std=gain * linear.in_features**-0.5)


def smooth_filters(num_filters: int, num_channels: int, height: int, width: int) -> torch.Tensor:
    """Random mixtures of the slowest cosines over a patch: each sees colours and roughly where they lie, not texture."""
    waves_KHW = [
        torch.outer(_cosine(row_turns, height), _cosine(column_turns, width))
        for row_turns in range(NUM_WAVES)
        for column_turns in range(NUM_WAVES)
    ]
    mixture = torch.randn(num_filters, num_channels, len(waves_KHW))
    filters = torch.einsum("fck,khw->fchw", mixture, torch.stack(waves_KHW))
    return filters / filters.flatten(1).norm(dim=1)[:, None, None, None]


def place_code(num_places: int, width: int) -> torch.Tensor:
    """Sines and cosines of row and column, slow to fast: half a turn over the picture, then one, two, ..."""
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
