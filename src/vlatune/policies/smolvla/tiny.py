"""A tiny SmolVLA that trains from scratch on a CPU in minutes, for the demo and tests.

`make_smolvla` writes a LeRobot `pretrained_model` folder without downloads. The same arguments give
the same bytes, except for the tokenizer's absolute path in policy_preprocessor.json.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.smolvla import SmolVLAConfig, SmolVLAPolicy
from lerobot.processor import (
    NewLineTaskProcessorStep,
    TokenizerProcessorStep,
    make_default_policy_processor_steps,
    make_policy_processor_pipelines,
)
from torch import nn

from vlatune.policies.base import Fit
from vlatune.policies.smolvla.size import SmolVLMSize, building_at
from vlatune.policies.tiny_models import (
    fitted,
    init_gain,
    init_layers,
    init_patches,
    pass_actions,
    prompt_length,
    round_up,
    train_tokenizer,
    write_base,
)
from vlatune.policies.tokenizer import end_with_newline

OUT_GAIN = 0.7  # inverts the expert's last norm, so that the first prediction is about the noise itself
DEPTH = 2  # one layer with self-attention, one with cross-attention


def tiny_size(vocab_size: int, image_size: int) -> SmolVLMSize:
    """Return a size with one token per image, which sees every pixel and learns positions fast."""
    return SmolVLMSize(
        width=96,
        depth=DEPTH,
        mlp_dim=192,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vision_width=96,
        vision_depth=1,
        vision_mlp_dim=192,
        vision_heads=4,
        image_size=image_size,
        patch_size=image_size,
        shuffle=1,
        vocab_size=vocab_size,
    )


def make_smolvla(folder: Path, fit: Fit, *, place: Path | None = None) -> Path:
    """Write the base model's folder atomically; see `write_base` for `place`."""
    prompts = sorted({end_with_newline(task) for task in (*fit.tasks, "")})
    tokenizer = train_tokenizer(prompts)
    config = SmolVLAConfig(
        **fitted(fit),
        resize_imgs_with_padding=(fit.image_size, fit.image_size),
        num_vlm_layers=DEPTH,
        expert_width_multiplier=1.0,
        tokenizer_max_length=prompt_length(tokenizer, prompts, fit),
    )
    size = tiny_size(round_up(len(tokenizer), 64), fit.image_size)
    policy = make_policy(config, size, fit.seed)
    return write_base(folder, policy, size, tokenizer, make_processors, padding=config.pad_language_to, place=place)


def make_policy(config: SmolVLAConfig, size: SmolVLMSize, seed: int) -> SmolVLAPolicy:
    depth, config.num_vlm_layers = config.num_vlm_layers, 0  # build only these layers; LeRobot logs if fewer are used
    with building_at(replace(size, depth=depth)), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = SmolVLAPolicy(config)
        init_for_scratch(policy)
    config.num_vlm_layers = depth
    return policy


def init_for_scratch(policy: SmolVLAPolicy) -> None:
    """Initialise weights for training from scratch, using torch's global generator.

    The constructor expects pretrained weights to follow. Here

    - every token enters the language model at unit scale, so that layers refine it;
    - queries and keys are large enough for non-uniform attention;
    - image tokens get a smooth position code;
    - the expert's branches start at zero, and the noise passes from the action's input to its output,
      which is the flow at time 1.
    """
    model: Any = policy.model
    vlm, expert = model.vlm_with_expert.get_vlm_model(), model.vlm_with_expert.lm_expert
    tokens = vlm.text_model.embed_tokens.weight
    unit = tokens.shape[1] ** -0.5  # LeRobot multiplies text and image tokens by sqrt(width)
    nn.init.normal_(tokens, std=unit)
    init_gain(vlm.connector.modality_projection.proj, gain=unit)
    nn.init.normal_(model.state_proj.weight)
    init_layers((*vlm.text_model.layers, *expert.layers))
    init_patches(vlm.vision_model.embeddings)
    for layer in expert.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    _pass_noise(model)


def _pass_noise(model: Any) -> None:
    """Initialise the action layers to pass noise and time through."""
    action_in, action_out = model.action_in_proj, model.action_out_proj
    width, dims = action_in.weight.shape
    turn = nn.init.orthogonal_(torch.empty(width, width))
    noise, other = turn[:, :dims], turn[:, dims:]
    for linear in (action_in, action_out):
        nn.init.zeros_(linear.bias)
    action_in.weight.data.copy_(noise)
    action_out.weight.data.copy_(OUT_GAIN * noise.T)
    carried = pass_actions(model)
    model.action_time_mlp_out.weight.data[:, carried:] = other[:, : width - carried]


def make_processors(config: SmolVLAConfig, tokenize: TokenizerProcessorStep):
    """Return LeRobot's pipelines for SmolVLA, with this tokenizer instead of the hub's."""
    steps = make_default_policy_processor_steps(config)
    return make_policy_processor_pipelines(
        input_steps=[
            steps.rename_observations,
            steps.add_batch_dim,
            NewLineTaskProcessorStep(),
            tokenize,
            steps.to_device,
            steps.normalize,
        ],
        output_steps=[steps.unnormalize, steps.to_cpu],
    )
