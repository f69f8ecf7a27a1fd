"""How PI0.5 and PI0 differ, names of their tensors, and PI0.5's prompt. Without torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlatune.batch import STATE, TASK, Columns

PALIGEMMA = "model.paligemma_with_expert.paligemma."
EMBEDDING = f"{PALIGEMMA}model.language_model.embed_tokens.weight"
CONFIG_DEFAULTS: Mapping[str, Any] = {
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "dtype": "float32",
    "image_resolution": (224, 224),
    "chunk_size": 50,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "tokenizer_max_length": 200,
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    "empty_cameras": 0,
    "input_features": {},
    "use_relative_actions": False,
    "relative_exclude_joints": ("gripper",),
}
"""LeRobot's defaults for keys missing from config.json."""
NUM_STATE_BINS = 256
LOWEST_BIN = -1
"""Bin of a state below the normalised range, which quantiles allow; it takes the most tokens."""


@dataclass(frozen=True)
class Kind:
    """How PI0.5 and PI0, both PaliGemma with an action expert, differ."""

    type: str
    title: str
    defaults: Mapping[str, Any]
    """LeRobot's defaults for keys missing from config.json."""
    has_state: bool
    """True if the state is a token of the expert and the time part of the action tokens; otherwise
    the state is in the prompt, and the time scales the expert's norms."""
    older_names: tuple[str, str]
    """Pattern and replacement of stored names, as in `_fix_pytorch_state_dict_keys` of LeRobot."""
    left_out: re.Pattern[str] | None = None
    """Tensors of openpi's checkpoints that the policy does not have, as in LeRobot."""


PI05 = Kind(
    type="pi05",
    title="PI0.5",
    defaults=CONFIG_DEFAULTS,
    has_state=False,
    older_names=(r"^action_time_mlp_(in|out)\.", r"time_mlp_\1."),
    left_out=re.compile(
        r"state_proj\.|paligemma_with_expert\.gemma_expert\.model\."
        r"(layers\.\d+\.(input_layernorm|post_attention_layernorm)|norm)\.weight$"
    ),
)
PI0 = Kind(
    type="pi0",
    title="PI0",
    defaults={
        **CONFIG_DEFAULTS,
        "tokenizer_max_length": 48,
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    },
    has_state=True,
    older_names=(r"^time_mlp_(in|out)\.", r"action_time_mlp_\1."),
)
KINDS = {kind.type: kind for kind in (PI05, PI0)}


def model_names(key: str, kind: Kind = PI05) -> tuple[str, ...]:
    """Map a stored name to the model's names: none, one, or two for openpi's tied tables."""
    if kind.left_out and kind.left_out.match(key):
        return ()
    key = re.sub(*kind.older_names, key)
    name = key if key.startswith("model.") else f"model.{key}"
    return (name, EMBEDDING) if name == f"{PALIGEMMA}lm_head.weight" else (name,)


def make_prompt(task: str, state_bins: Sequence[int]) -> str:
    """Format the prompt as LeRobot's PI0.5 processor does."""
    text = task.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {text}, State: {' '.join(map(str, state_bins))};\nAction: "


@dataclass(frozen=True)
class StatePrompt:
    """Replace `task` by the prompt: the task and the state, already normalised, in 256 bins."""

    dims: tuple[int, ...] = ()
    """With several robots, the number of state dims of each dataset; the prompt has no others."""

    def __call__(self, columns: Columns) -> Columns:
        edges = np.linspace(-1, 1, NUM_STATE_BINS + 1)[:-1]
        binned_NS = np.digitize(columns[STATE], bins=edges) - 1
        prompts = np.empty(len(binned_NS), dtype=object)
        dims = [self.dims[number] for number in columns["dataset_index"]] if self.dims else [None] * len(prompts)
        for row, (task, state) in enumerate(zip(columns[TASK], binned_NS.tolist(), strict=True)):
            prompts[row] = make_prompt(task, state[: dims[row]])
        return columns | {TASK: prompts}
