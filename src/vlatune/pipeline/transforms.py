"""What happens to rows on the CPU before the policy sees them: small frozen callables, columns -> columns.

The same list serves training, evaluation and inspection. Each repeats one step of LeRobot's processors on
numpy columns, equal to the last bit (tests hold it against LeRobot's own), without torch, so that a read
worker need not import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vlatune.batch import ACTION, NOISE, SLOT, STATE, TASK, TIME, TOKEN_MASK, TOKENS, Columns
from vlatune.pipeline.tokenizer import load_tokenizer
from vlatune.random_streams import Stream, make_generator

NORMALISE_EPS = np.float32(1e-8)
"""LeRobot's `NormalizerProcessorStep.eps`."""


class Transform(Protocol):
    def __call__(self, columns: Columns) -> Columns: ...


def apply_all(transforms: Sequence[Transform], columns: Columns) -> Columns:
    for transform in transforms:
        columns = transform(columns)
    return columns


@dataclass(frozen=True)
class Rename:
    """Columns under the policy's names instead of the dataset's."""

    names: Mapping[str, str]

    def __call__(self, columns: Columns) -> Columns:
        return {self.names.get(name, name): values for name, values in columns.items()}


@dataclass(frozen=True)
class Normalise:
    """One column onto the policy's scale: QUANTILES, MIN_MAX or MEAN_STD, as LeRobot does."""

    key: str
    mode: str
    low: np.ndarray
    """q01, min or mean."""
    high: np.ndarray
    """q99, max or std."""

    def __call__(self, columns: Columns) -> Columns:
        return columns | {self.key: self.forward(columns[self.key])}

    def forward(self, values: np.ndarray) -> np.ndarray:
        low, high = self.low.astype(np.float32), self.high.astype(np.float32)
        if self.mode == "MEAN_STD":
            return (values - low) / (high + NORMALISE_EPS)
        return np.float32(2.0) * (values - low) / _span(low, high) - np.float32(1.0)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        low, high = self.low.astype(np.float32), self.high.astype(np.float32)
        if self.mode == "MEAN_STD":
            return values * high + low
        return (values + np.float32(1.0)) * _span(low, high) / np.float32(2.0) + low


def _span(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    span = high - low
    return np.where(span == 0, NORMALISE_EPS, span)


@dataclass(frozen=True)
class StatePrompt:
    """PI0.5's prompt: the sentence and the state in 256 bins, replacing `task`."""

    def __call__(self, columns: Columns) -> Columns:
        bins = np.linspace(-1, 1, 256 + 1)[:-1]
        binned_NS = np.digitize(columns[STATE], bins=bins) - 1
        prompts = np.empty(len(binned_NS), dtype=object)
        for row, (task, state) in enumerate(zip(columns[TASK], binned_NS.tolist(), strict=True)):
            sentence = task.strip().replace("_", " ").replace("\n", " ")
            prompts[row] = f"Task: {sentence}, State: {' '.join(map(str, state))};\nAction: "
        return columns | {TASK: prompts}


@dataclass(frozen=True)
class Tokenise:
    """`task` -> token ids and mask, padded on the right to `max_length`, longer prompts cut."""

    tokenizer_file: str
    max_length: int
    pad_id: int

    def __call__(self, columns: Columns) -> Columns:
        tokenizer = load_tokenizer(self.tokenizer_file, self.max_length)
        encoded = tokenizer.encode_batch([str(prompt) for prompt in columns[TASK]])
        tokens_NL = np.full((len(encoded), self.max_length), self.pad_id, dtype=np.int64)
        mask_NL = np.zeros((len(encoded), self.max_length), dtype=bool)
        for row, encoding in enumerate(encoded):
            tokens_NL[row, : len(encoding.ids)] = encoding.ids
            mask_NL[row, : len(encoding.ids)] = True
        rest = {name: values for name, values in columns.items() if name != TASK}
        return rest | {TOKENS: tokens_NL, TOKEN_MASK: mask_NL}


@dataclass(frozen=True)
class PadActions:
    """Actions widened with zeros to the policy's number of dims."""

    dims: int

    def __call__(self, columns: Columns) -> Columns:
        action_NTA = columns[ACTION]
        padded = np.zeros((*action_NTA.shape[:-1], self.dims), dtype=np.float32)
        padded[..., : action_NTA.shape[-1]] = action_NTA
        return columns | {ACTION: padded}


@dataclass(frozen=True)
class DrawFlow:
    """Noise and time of flow matching: in training a pure function of (seed, place in the run's order), so that a frame
    that comes again draws anew; for validation of (seed, frame), the same whenever a frame is looked at.

    No generator's state has to be saved, the draws do not depend on the number of workers, and nothing is
    drawn on the device's critical path. Distribution as LeRobot's: N(0, 1) and Beta(alpha, beta) * scale + offset.
    """

    seed: int
    horizon: int
    dims: int
    samples: int = 1
    by_frame: bool = False
    alpha: float = 1.5
    beta: float = 1.0
    scale: float = 0.999
    offset: float = 0.001

    def __call__(self, columns: Columns) -> Columns:
        stream = Stream.EVAL_NOISE if self.by_frame else Stream.NOISE
        keys = ("dataset_index", "index") if self.by_frame else (SLOT,)
        numbers = np.stack([columns[key] for key in keys], axis=1).tolist()
        noise = np.empty((len(numbers), self.samples, self.horizon, self.dims), dtype=np.float32)
        time = np.empty((len(numbers), self.samples), dtype=np.float32)
        for row, key in enumerate(numbers):
            rng = make_generator(stream, self.seed, *key)
            for draw in range(self.samples):  # one after the other: the first does not depend on how many follow
                rng.standard_normal(out=noise[row, draw], dtype=np.float32)
                time[row, draw] = rng.beta(self.alpha, self.beta) * self.scale + self.offset
        return columns | {NOISE: noise, TIME: time}


@dataclass(frozen=True)
class Select:
    """Keep these columns only; strings and what the policy does not use stay behind."""

    keys: tuple[str, ...] = field(default=())

    def __call__(self, columns: Columns) -> Columns:
        return {key: columns[key] for key in self.keys}
