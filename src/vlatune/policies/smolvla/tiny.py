"""A tiny SmolVLA that trains from scratch on a CPU in minutes, for the demo and tests.

`make_smolvla` writes a LeRobot `pretrained_model` folder without downloads. The same arguments give
the same bytes, except for the tokenizer's absolute path in policy_preprocessor.json.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.smolvla import SmolVLAConfig, SmolVLAPolicy
from lerobot.processor import NewLineTaskProcessorStep, TokenizerProcessorStep
from torch import nn

from vlatune.policies.base import Fit
from vlatune.policies.model_size import building_at
from vlatune.policies.smolvla.size import SmolVLMSize
from vlatune.policies.tiny_models import (
    DEPTH,
    fitted,
    init_gain,
    init_layers,
    init_patches,
    pass_actions,
    tiny_size,
    train_tokenizer,
    write_base,
)
from vlatune.policies.tokenizer import end_with_newline

OUT_GAIN = 0.7  # inverts the expert's last norm, so that the first prediction is about the noise itself


def make_smolvla(folder: Path, fit: Fit, *, place: Path | None = None) -> Path:
    """Write the base model's folder atomically; see `write_base` for `place`."""
    prompts = sorted({end_with_newline(task) for task in (*fit.tasks, "")})
    tokenizer = train_tokenizer(prompts)
    config = SmolVLAConfig(
        **fitted(fit, tokenizer, prompts),
        resize_imgs_with_padding=(fit.image_size, fit.image_size),
        num_vlm_layers=DEPTH,
        expert_width_multiplier=1.0,
    )
    size = tiny_size(SmolVLMSize, tokenizer, fit, heads=4, kv_heads=2, image_size=fit.image_size, shuffle=1)
    policy = make_policy(config, size, fit.seed)
    return write_base(folder, policy, size, tokenizer, _processor_steps, place=place)


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


def _processor_steps(config: Any, tokenize: TokenizerProcessorStep, steps: Any) -> tuple[list[Any], list[Any]]:
    """Return LeRobot's steps for SmolVLA, with this tokenizer instead of the hub's."""
    first = [steps.rename_observations, steps.add_batch_dim, NewLineTaskProcessorStep()]
    return [*first, tokenize, steps.to_device, steps.normalize], [steps.unnormalize, steps.to_cpu]
