"""PI0.5's prompt: the sentence and the state, each value as one of 256 bins. Without torch: read tasks write it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlatune.batch import STATE, TASK, Columns

NUM_STATE_BINS = 256


def make_prompt(task: str, state_bins: Sequence[int]) -> str:
    """As LeRobot's PI0.5 processor writes it."""
    sentence = task.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {sentence}, State: {' '.join(map(str, state_bins))};\nAction: "


@dataclass(frozen=True)
class StatePrompt:
    """The prompt in place of `task`; the state is on its scale already."""

    dims: tuple[int, ...] = ()
    """Of several robots: how many of the state's values each dataset has; the prompt has no others."""

    def __call__(self, columns: Columns) -> Columns:
        edges = np.linspace(-1, 1, NUM_STATE_BINS + 1)[:-1]
        binned_NS = np.digitize(columns[STATE], bins=edges) - 1
        prompts = np.empty(len(binned_NS), dtype=object)
        dims = [self.dims[number] for number in columns["dataset_index"]] if self.dims else [None] * len(prompts)
        for row, (task, state) in enumerate(zip(columns[TASK], binned_NS.tolist(), strict=True)):
            prompts[row] = make_prompt(task, state[: dims[row]])
        return columns | {TASK: prompts}
