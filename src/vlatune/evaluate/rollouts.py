"""Open-loop rollouts: whole episodes, the policy asked as often as on a robot, its actions laid end to end beside the recorded ones.

    frame        0  1  2  3  4  5  6  7        a chunk of 5 actions, of which a robot makes 3 (n_action_steps)
    asked at     0        3        6
    laid out     0a 0b 0c 3a 3b 3c 6a 6b       all five count in the error by place in the chunk

The policy never sees what its own actions would have led to: it is shown the recorded observation each time. Deterministic
as every validation is: samples, noise and times are functions of the settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import ACTION, TASK
from vlatune.config import EvalConfig
from vlatune.evaluate.held_out import read_chosen
from vlatune.evaluate.predictions import OnBatch, Predictions, predict_all
from vlatune.policies.base_folder import read_config
from vlatune.policies.registry import get_policy
from vlatune.report.kept_samples import EvalSample
from vlatune.run_setup import Setup

ACTION_STEPS = "n_action_steps"
SHOWN_ROLLOUTS = 4
"""On the page, the worst first; figures of all are in eval.json."""
SHOWN_FRAMES = 3
"""Of each: where the actions that followed were furthest from the recorded ones."""


@dataclass(frozen=True)
class Replans:
    """How a chunk is used."""

    positions: np.ndarray
    """Of the actions in it that are made."""
    offsets: np.ndarray
    """Frames from where the policy is asked to each of them."""
    every: int
    """Frames from one question to the next."""


def plan_replans(offsets: Sequence[int], num_steps: int) -> Replans:
    """The first actions from now on, `num_steps` of them or as many as there are.

    >>> plan_replans((-1, 0, 1, 2, 3), 3).positions.tolist(), plan_replans((0, 2, 4, 6), 2).every
    ([1, 2, 3], 4)
    """
    ahead = np.flatnonzero(np.asarray(offsets) >= 0)
    made, rest = ahead[:num_steps], ahead[num_steps:]
    frames = np.asarray(offsets)[made]
    gap = int(frames[-1] - frames[-2]) if len(frames) > 1 else 1
    end = int(offsets[rest[0]]) if len(rest) else int(frames[-1]) + gap
    return Replans(made, frames, max(1, end))


def action_steps(setup: Setup) -> int:
    """How many actions of a chunk LeRobot's policy makes before it asks anew; the whole chunk where it does not say."""
    spec, card = setup.policy, get_policy(setup.policy.type)
    stored = read_config(Path(spec.folder), setup.adapter.schema).get(ACTION_STEPS)
    usual = card.overrides[ACTION_STEPS].default if ACTION_STEPS in card.overrides else None
    return int(spec.overrides.get(ACTION_STEPS) or stored or usual or spec.horizon)


@dataclass(frozen=True)
class Rollout:
    """One episode; frames that no action falls on are NaN."""

    dataset: int | None
    number: int
    """Among the held-out episodes."""
    episode_index: int
    task: str
    asked: np.ndarray
    """Frames at which the policy was asked."""
    true_LA: np.ndarray
    predicted_LA: np.ndarray
    error_KTA: np.ndarray
    """Of each chunk, all of it; NaN past the episode's end."""
    replans: Replans

    @property
    def errors(self) -> np.ndarray:
        """(L, A), absolute."""
        return np.abs(self.predicted_LA - self.true_LA)

    @property
    def error(self) -> float:
        return float(np.nanmean(self.errors))

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        return {
            "episode": self.episode_index,
            "frames": len(self.true_LA),
            "error": self.error,
            "per_dim_error": dict(zip(names, mean_over(self.errors, 0), strict=True)),
            "per_frame_error": mean_over(self.errors, 1),
        } | ({} if self.dataset is None else {"dataset": self.dataset})


def mean_over(errors: np.ndarray, axis: int | tuple[int, ...]) -> list[float | None]:
    """Means along all axes but one, without NaN, as JSON has them: None where there is nothing else."""
    counts = np.isfinite(errors).sum(axis=axis)
    means = np.nansum(errors, axis=axis) / np.maximum(counts, 1)
    return [mean if count else None for mean, count in zip(means.tolist(), counts.tolist(), strict=True)]


def roll_out(
    setup: Setup, module: Any, options: EvalConfig, *, on_batch: OnBatch = lambda done, total: None
) -> list[Rollout]:
    """Episodes spread evenly over the held-out ones, the worst first."""
    chosen = np.unique(np.linspace(0, len(setup.held_out) - 1, min(options.rollouts, len(setup.held_out))).round())
    steps, made = action_steps(setup), []
    for number in chosen.astype(int).tolist() if options.rollouts else []:
        made.append(_roll_out_one(setup, module, options, number, steps))
        on_batch(len(made), len(chosen))
    return sorted(made, key=lambda one: -one.error)


def _roll_out_one(setup: Setup, module: Any, options: EvalConfig, number: int, steps: int) -> Rollout:
    dataset, length = int(setup.held_out.dataset[number]), int(setup.held_out.length[number])
    spec, position = setup.specs[dataset], int(setup.held_out.position[number])
    replans = plan_replans(next(one.offsets for one in spec.vectors if one.column == ACTION) or (0,), steps)
    asked, of = np.arange(0, length, replans.every), dataset if setup.binding.parts else None
    task, parts = "", []
    for frames in np.split(asked, range(options.batch_size, len(asked), options.batch_size)):
        rows = read_chosen(setup, _first_frame(setup, number) + frames)
        task = str(rows[TASK][0])
        parts.append(predict_all(setup, module, rows, options, blanks=("none",), dataset=of)["none"])
    whole = Predictions(
        *(np.concatenate([getattr(one, name) for one in parts]) for name in ("true_NTA", "predicted_NTA", "valid_NT")),
        loss=0.0,
    )
    true_LA, predicted_LA = (
        lay_out(chunks, asked, length, replans) for chunks in (whole.true_NTA, whole.predicted_NTA)
    )
    return Rollout(
        dataset=of,
        number=number,
        episode_index=int(setup.metas[dataset].episodes.index[position]),
        task=task,
        asked=asked,
        true_LA=true_LA,
        predicted_LA=predicted_LA,
        error_KTA=np.where(whole.valid_NT[..., None], np.abs(whole.predicted_NTA - whole.true_NTA), np.nan),
        replans=replans,
    )


def lay_out(chunks_KTA: np.ndarray, asked: np.ndarray, length: int, replans: Replans) -> np.ndarray:
    """The actions that are made, each at its frame, (L, A)."""
    laid = np.full((length, chunks_KTA.shape[-1]), np.nan, dtype=np.float32)
    for chunk_TA, begin in zip(chunks_KTA, asked.tolist(), strict=True):
        frames = begin + replans.offsets
        inside = frames < length
        laid[frames[inside]] = chunk_TA[replans.positions[inside]]
    return laid


def _first_frame(setup: Setup, number: int) -> int:
    """Its number among all held-out frames, laid end to end."""
    return int(setup.held_out.length[:number].sum())


def rollout_figures(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, Any]:
    """Of one robot: by dim, by place in the chunk, by both, and of each episode."""
    laid_NA = np.concatenate([one.errors for one in rollouts])
    chunks_KTA = np.concatenate([one.error_KTA for one in rollouts])
    by_dim_AT = np.moveaxis(chunks_KTA, 2, 0)
    return {
        "error": float(np.nanmean(laid_NA)),
        "num_chunks": len(chunks_KTA),
        "replan_every": rollouts[0].replans.every,
        "per_dim_error": dict(zip(names, mean_over(laid_NA, 0), strict=True)),
        "per_horizon_error": mean_over(chunks_KTA, (0, 2)),
        "per_dim_horizon_error": {name: mean_over(of_dim, 0) for name, of_dim in zip(names, by_dim_AT, strict=True)},
        "episodes": [one.to_json(names) for one in rollouts],
    }


def joint_rollouts(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several robots, what can be said of all: the rest is under `datasets`, in each robot's own units."""
    counts = [sum(episode["frames"] for episode in one["episodes"]) for one in each]
    episodes = sorted((episode for one in each for episode in one["episodes"]), key=lambda one: -one["error"])
    return {
        "error": float(np.average([one["error"] for one in each], weights=counts)),
        "num_chunks": sum(one["num_chunks"] for one in each),
        "replan_every": each[0]["replan_every"],
        "episodes": episodes,
    }


def rollouts_to_show(setup: Setup, rollouts: Sequence[Rollout]) -> list[EvalSample]:
    """The worst, each with the frames after which it went furthest wrong."""
    return [_sample(setup, one) for one in rollouts[:SHOWN_ROLLOUTS]]


def _sample(setup: Setup, one: Rollout) -> EvalSample:
    by_chunk = np.array(mean_over(one.error_KTA[:, one.replans.positions], (1, 2)), dtype=np.float64)
    worst = np.sort(one.asked[np.argsort(-by_chunk, kind="stable")[:SHOWN_FRAMES]])
    rows = read_chosen(setup, _first_frame(setup, one.number) + worst)
    return EvalSample(
        episode_index=one.episode_index,
        frame_index=0,
        task=one.task,
        images=dict(_pictures(setup, rows, worst, one.dataset)),
        true_TA=one.true_LA,
        predicted_TA=one.predicted_LA,
        valid_T=np.isfinite(one.true_LA[:, 0]),  # a frame has all of its dims, or none
    )


def _pictures(
    setup: Setup, rows: Mapping[str, np.ndarray], frames: np.ndarray, dataset: int | None
) -> Iterator[tuple[str, np.ndarray]]:
    absent = {camera.column for camera in setup.specs[dataset or 0].absent}
    for row, frame in enumerate(frames.tolist()):
        for name, _ in setup.binding.cameras:
            if name not in absent:
                yield f"{name}, frame {frame}", newest(rows[name][row])


def newest(pictures: np.ndarray) -> np.ndarray:
    """(3, H, W), where a policy looks at several observations, too."""
    return pictures[-1] if pictures.ndim == 4 else pictures
