"""Open-loop rollouts: predict complete episodes with the replanning interval of a robot.

    frame        0  1  2  3  4  5  6  7     a chunk has 5 actions, n_action_steps = 3 are executed
    replan at    0        3        6
    executed     0a 0b 0c 3a 3b 3c 6a 6b    the error by chunk position counts all 5

The policy always gets the recorded observation, not the consequences of its own actions. Results
are deterministic functions of the settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import ACTION, TASK
from vlatune.config.settings import EvalConfig
from vlatune.evaluate.held_out import read_chosen
from vlatune.evaluate.predictions import OnBatch, Predictions, predict_all, present_cameras
from vlatune.policies.base_folder import read_config
from vlatune.registry import get_policy_info
from vlatune.run.kept_samples import EvalSample
from vlatune.run_setup import Inputs

ACTION_STEPS = "n_action_steps"
SHOWN_ROLLOUTS = 4
"""Number of rollouts on the page, worst first; eval.json has the figures of all."""
SHOWN_FRAMES = 3
"""Images per rollout, of the frames with the largest error afterwards."""


@dataclass(frozen=True)
class Replans:
    """Positions and interval of the executed actions of a chunk."""

    positions: np.ndarray
    """Indices of the executed actions within the chunk."""
    offsets: np.ndarray
    """Frame offsets of the executed actions from the replanning frame."""
    every: int
    """Frames between two predictions."""


def plan_replans(offsets: Sequence[int], num_steps: int) -> Replans:
    """Select the first `num_steps` current and future actions of a chunk, or as many as there are.

    >>> plan_replans((-1, 0, 1, 2, 3), 3).positions.tolist(), plan_replans((0, 2, 4, 6), 2).every
    ([1, 2, 3], 4)
    """
    ahead = np.flatnonzero(np.asarray(offsets) >= 0)
    executed, rest = ahead[:num_steps], ahead[num_steps:]
    frames = np.asarray(offsets)[executed]
    gap = int(frames[-1] - frames[-2]) if len(frames) > 1 else 1
    end = int(offsets[rest[0]]) if len(rest) else int(frames[-1]) + gap
    return Replans(executed, frames, max(1, end))


def action_steps(setup: Inputs) -> int:
    """Return how many actions of a chunk LeRobot's policy executes; by default all."""
    spec, info = setup.policy, get_policy_info(setup.policy.type)
    stored = read_config(Path(spec.folder), setup.adapter.schema).get(ACTION_STEPS)
    default = info.option_defaults.get(ACTION_STEPS)
    return int(spec.overrides.get(ACTION_STEPS) or stored or default or spec.horizon)


@dataclass(frozen=True)
class Rollout:
    """Rollout of one episode; frames without an action are NaN."""

    dataset: int | None
    number: int
    """Index among the held-out episodes."""
    episode_index: int
    task: str
    replan_frames: np.ndarray
    """Frames at which a chunk was predicted."""
    true_LA: np.ndarray
    predicted_LA: np.ndarray
    error_KTA: np.ndarray
    """Errors of complete chunks; NaN past the episode's end."""
    replans: Replans

    @property
    def errors(self) -> np.ndarray:
        """Return absolute errors, (L, A)."""
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
    """Return means over `axis` without NaN; None where all values are NaN."""
    counts = np.isfinite(errors).sum(axis=axis)
    means = np.nansum(errors, axis=axis) / np.maximum(counts, 1)
    return [mean if count else None for mean, count in zip(means.tolist(), counts.tolist(), strict=True)]


def roll_out(
    setup: Inputs, module: Any, options: EvalConfig, *, on_batch: OnBatch = lambda done, total: None
) -> list[Rollout]:
    """Roll out episodes spread evenly over the held-out episodes, worst first."""
    chosen = np.unique(np.linspace(0, len(setup.held_out) - 1, min(options.rollouts, len(setup.held_out))).round())
    steps, rollouts = action_steps(setup), []
    for number in chosen.astype(int).tolist() if options.rollouts else []:
        rollouts.append(_roll_out_one(setup, module, options, number, steps))
        on_batch(len(rollouts), len(chosen))
    return sorted(rollouts, key=lambda one: -one.error)


def _roll_out_one(setup: Inputs, module: Any, options: EvalConfig, number: int, steps: int) -> Rollout:
    dataset, length = int(setup.held_out.dataset[number]), int(setup.held_out.length[number])
    spec, position = setup.specs[dataset], int(setup.held_out.position[number])
    replans = plan_replans(next(one.offsets for one in spec.vectors if one.column == ACTION) or (0,), steps)
    replan_frames, robot = np.arange(0, length, replans.every), dataset if setup.binding.parts else None
    task, parts = "", []
    for frames in np.split(replan_frames, range(options.batch_size, len(replan_frames), options.batch_size)):
        rows = read_chosen(setup, _first_frame(setup, number) + frames)
        task = str(rows[TASK][0])
        parts.append(predict_all(setup, module, rows, options, dataset=robot)["none"])
    joined = Predictions(
        *(np.concatenate([getattr(one, name) for one in parts]) for name in ("true_NTA", "predicted_NTA", "valid_NT")),
        loss=0.0,
    )
    true_LA, predicted_LA = (
        lay_out(chunks, replan_frames, length, replans) for chunks in (joined.true_NTA, joined.predicted_NTA)
    )
    return Rollout(
        dataset=robot,
        number=number,
        episode_index=int(setup.metas[dataset].episodes.index[position]),
        task=task,
        replan_frames=replan_frames,
        true_LA=true_LA,
        predicted_LA=predicted_LA,
        error_KTA=np.where(joined.valid_NT[..., None], np.abs(joined.predicted_NTA - joined.true_NTA), np.nan),
        replans=replans,
    )


def lay_out(chunks_KTA: np.ndarray, replan_frames: np.ndarray, length: int, replans: Replans) -> np.ndarray:
    """Place the executed actions at their frames, (L, A)."""
    laid = np.full((length, chunks_KTA.shape[-1]), np.nan, dtype=np.float32)
    for chunk_TA, begin in zip(chunks_KTA, replan_frames.tolist(), strict=True):
        frames = begin + replans.offsets
        inside = frames < length
        laid[frames[inside]] = chunk_TA[replans.positions[inside]]
    return laid


def _first_frame(setup: Inputs, number: int) -> int:
    """Return the index of the first frame among all held-out frames."""
    return int(setup.held_out.length[:number].sum())


def rollout_figures(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, Any]:
    """Return the errors of one robot by dim, by chunk position, by both, and by episode."""
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
    """Return the figures that are comparable across robots."""
    counts = [sum(episode["frames"] for episode in one["episodes"]) for one in each]
    episodes = sorted((episode for one in each for episode in one["episodes"]), key=lambda one: -one["error"])
    return {
        "error": float(np.average([one["error"] for one in each], weights=counts)),
        "num_chunks": sum(one["num_chunks"] for one in each),
        "replan_every": each[0]["replan_every"],
        "episodes": episodes,
    }


def rollouts_to_show(setup: Inputs, rollouts: Sequence[Rollout]) -> list[EvalSample]:
    """Return the worst rollouts with images of the frames that precede the largest errors."""
    return [_sample(setup, one) for one in rollouts[:SHOWN_ROLLOUTS]]


def _sample(setup: Inputs, one: Rollout) -> EvalSample:
    by_chunk = np.array(mean_over(one.error_KTA[:, one.replans.positions], (1, 2)), dtype=np.float64)
    worst = np.sort(one.replan_frames[np.argsort(-by_chunk, kind="stable")[:SHOWN_FRAMES]])
    rows = read_chosen(setup, _first_frame(setup, one.number) + worst)
    return EvalSample(
        episode_index=one.episode_index,
        frame_index=0,
        task=one.task,
        images={
            f"{name}, frame {frame}": newest(rows[name][row])
            for row, frame in enumerate(worst.tolist())
            for name in present_cameras(setup, one.dataset)
        },
        true_TA=one.true_LA,
        predicted_TA=one.predicted_LA,
        valid_T=np.isfinite(one.true_LA[:, 0]),  # a frame has all dims or none
    )


def newest(images: np.ndarray) -> np.ndarray:
    """Return the newest image (3, H, W) of an observation that may have several."""
    return images[-1] if images.ndim == 4 else images
