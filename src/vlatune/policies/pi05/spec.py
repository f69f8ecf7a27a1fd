"""Names of the tensors of PI0.5 and PI0, and PI0.5's prompt. Without torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlatune.batch import STATE, TASK, Columns

PALIGEMMA = "model.paligemma_with_expert.paligemma."
EMBEDDING = f"{PALIGEMMA}model.language_model.embed_tokens.weight"
NUM_STATE_BINS = 256
LOWEST_BIN = -1
"""Bin of a state below the normalised range, which quantiles allow; it takes the most tokens."""


OLDER_NAMES = {
    "pi05": (r"^action_time_mlp_(in|out)\.", r"time_mlp_\1."),
    "pi0": (r"^time_mlp_(in|out)\.", r"action_time_mlp_\1."),
}
"""Pattern and replacement of stored names, as in `_fix_pytorch_state_dict_keys` of LeRobot."""
LEFT_OUT = re.compile(
    r"state_proj\.|paligemma_with_expert\.gemma_expert\.model\."
    r"(layers\.\d+\.(input_layernorm|post_attention_layernorm)|norm)\.weight$"
)
"""Tensors of openpi's checkpoints that PI0.5 does not have, as in LeRobot."""


def model_names(key: str, kind: str = "pi05") -> tuple[str, ...]:
    """Map a stored name to the model's names: none, one, or two for openpi's tied tables."""
    if kind == "pi05" and LEFT_OUT.match(key):
        return ()
    key = re.sub(*OLDER_NAMES[kind], key)
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
    """Number of state dims of each dataset if there are several robots; the prompt has no others."""

    def __call__(self, columns: Columns) -> Columns:
        edges = np.linspace(-1, 1, NUM_STATE_BINS + 1)[:-1]
        binned_NS = np.digitize(columns[STATE], bins=edges) - 1
        prompts = np.empty(len(binned_NS), dtype=object)
        dims = [self.dims[number] for number in columns["dataset_index"]] if self.dims else [None] * len(prompts)
        for row, (task, state) in enumerate(zip(columns[TASK], binned_NS.tolist(), strict=True)):
            prompts[row] = make_prompt(task, state[: dims[row]])
        return columns | {TASK: prompts}
