"""A tiny PI0.5 or PI0 that trains from scratch on a CPU in minutes, for the demo and tests.

`make_tiny` writes a LeRobot `pretrained_model` folder without downloads. The same arguments give
the same bytes, except for the tokenizer's absolute path in policy_preprocessor.json.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lerobot.policies.pi0.processor_pi0 import Pi0NewLineProcessor
from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
from lerobot.processor import AbsoluteActionsProcessorStep, RelativeActionsProcessorStep, TokenizerProcessorStep
from torch import nn

from vlatune.policies.base import Fit
from vlatune.policies.model_size import building_at
from vlatune.policies.pi05.size import Pi05Size
from vlatune.policies.pi05.spec import LOWEST_BIN, NUM_STATE_BINS, make_prompt
from vlatune.policies.pi05.weights import CLASSES, PiPolicy
from vlatune.policies.tiny_models import (
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

OUT_GAIN = 1.06  # inverts the expert's last norm, so that the first prediction is the noise itself
EXPERT_GAIN = 0.0  # the expert's branches start at zero, so that the noise passes through


def make_tiny_pi05(folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """Write a tiny PI0.5, given the fields of its `Fit`."""
    return make_tiny("pi05", folder, Fit(seed=seed, **settings))


def make_tiny(kind: str, folder: Path, fit: Fit, *, place: Path | None = None) -> Path:
    """Write the base model's folder atomically and return it; see `write_base` for `place`."""
    if kind == "pi0":
        prompts = sorted({end_with_newline(task) for task in (*fit.tasks, "")})
        tokenizer = train_tokenizer(prompts)
    else:
        prompts = sorted({make_prompt(task, [LOWEST_BIN] * fit.state_dim) for task in (*fit.tasks, "")})
        # One token per state bin and per word.
        tasks = sorted(set(fit.tasks)) or [""]
        tokenizer = train_tokenizer([make_prompt(task, range(NUM_STATE_BINS)) for task in tasks])
    config_class, policy_class = CLASSES[kind]
    config = config_class(**fitted(fit, tokenizer, prompts), image_resolution=(fit.image_size, fit.image_size))
    size = tiny_size(Pi05Size, tokenizer, fit, expert_width=96, expert_mlp_dim=192)
    with building_at(size), torch.random.fork_rng(devices=[]):
        torch.manual_seed(fit.seed)
        policy = policy_class(config)
        init_for_scratch(policy)
    return write_base(folder, policy, size, tokenizer, _processor_steps, place=place)


make_pi05, make_pi0 = partial(make_tiny, "pi05"), partial(make_tiny, "pi0")


def init_for_scratch(policy: PiPolicy) -> None:
    """Initialise weights for training from scratch, using torch's global generator.

    The constructors expect pretrained weights to follow. Here

    - every token enters the language model at unit scale, so that layers refine it;
    - queries and keys are large enough for non-uniform attention;
    - image tokens get a smooth position code;
    - the gates of PI0.5's expert start open, otherwise actions could not see the prefix;
    - the noise passes from the action's input to its output, which is the flow at time 1.
    """
    model: Any = policy.model.paligemma_with_expert
    paligemma, expert = model.paligemma.model, model.gemma_expert.model
    init_gain(paligemma.multi_modal_projector.linear)
    tokens = paligemma.language_model.embed_tokens.weight
    nn.init.normal_(tokens, std=tokens.shape[1] ** -0.5)  # Gemma multiplies an embedding by sqrt(width)
    init_layers((*paligemma.language_model.layers, *expert.layers))
    init_patches(paligemma.vision_tower.vision_model.embeddings)
    for layer in expert.layers:
        init_gain(layer.self_attn.o_proj, gain=EXPERT_GAIN)
        init_gain(layer.mlp.down_proj, gain=EXPERT_GAIN)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            if norm.dense is not None:
                _open_gate(norm.dense)
    if expert.norm.dense is not None:
        nn.init.zeros_(expert.norm.dense.bias)
    action_in, action_out = policy.model.action_in_proj, policy.model.action_out_proj
    nn.init.orthogonal_(action_in.weight)
    nn.init.normal_(action_in.bias)
    action_in.bias.data -= action_in.weight.data @ (action_in.weight.data.T @ action_in.bias.data)
    action_out.weight.data.copy_(OUT_GAIN * action_in.weight.data.T)
    nn.init.zeros_(action_out.bias)
    if policy.config.type != "pi0":
        return
    pi0: Any = policy.model
    init_gain(pi0.state_proj)
    width, dims = action_in.weight.shape
    if width >= 2 * dims:  # only benchmarks use narrower ones
        carried, mlp_out = pass_actions(pi0), pi0.action_time_mlp_out
        nn.init.normal_(mlp_out.weight.data[:, carried:], std=width**-0.5)
        mlp_out.bias.data.copy_(action_in.bias.data)


def _open_gate(dense: nn.Linear) -> None:
    """Start AdaRMS as a plain residual block: scale 0, shift 0, gate 1."""
    width = dense.out_features // 3
    nn.init.zeros_(dense.bias)
    nn.init.ones_(dense.bias[2 * width :])


def _processor_steps(config: Any, tokenize: TokenizerProcessorStep, steps: Any) -> tuple[list[Any], list[Any]]:
    """Return LeRobot's steps for the policy, with this tokenizer instead of the hub's."""
    relative = RelativeActionsProcessorStep(enabled=False)
    first, last = [steps.rename_observations, steps.add_batch_dim], [relative, steps.normalize]
    if config.type == "pi05":
        prompt = Pi05PrepareStateTokenizerProcessorStep(max_state_dim=config.max_state_dim)
        before = [*first, *last, prompt, tokenize, steps.to_device]
    else:
        before = [*first, Pi0NewLineProcessor(), tokenize, steps.to_device, *last]
    absolute = AbsoluteActionsProcessorStep(enabled=False, relative_step=relative)
    return before, [steps.unnormalize, absolute, steps.to_cpu]
