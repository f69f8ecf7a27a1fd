"""The sample contract: every key from the reader to the policy, with its dtype and shape.

Shape letters, used as name suffixes: B batch, N rows, T action horizon, A action dims, S state
dims, P padded dims of the policy, K flow samples, L prompt tokens, C channels, H height, W width.

| key                            | dtype   | shape        | made by                         |
|--------------------------------|---------|--------------|---------------------------------|
| `observation.images.*`         | uint8   | (N, 3, H, W) | reader, at the policy's size    |
| `observation.state`            | float32 | (N, S)       | reader; normalised by transforms|
| `action`                       | float32 | (N, T, A)    | reader; normalised by transforms|
| `action_is_pad`                | bool    | (N, T)       | reader                          |
| `task`                         | str     | (N,)         | reader; removed by tokenising   |
| `observation.language.tokens`  | int64   | (N, L)       | transforms                      |
| `observation.language.attention_mask` | bool | (N, L)   | transforms                      |
| `noise`                        | float32 | (N, K, T, P) | transforms, from (seed, slot)   |
| `time`                         | float32 | (N, K)       | transforms, from (seed, slot)   |
| `dataset_index`, `index`, `episode_index`, `frame_index` | int64 | (N,) | reader     |
| `timestamp`                    | float32 | (N,)         | reader                          |
| `slot`                         | int64   | (N,)         | plan: position in the run's order |
| `action_dim_mask`              | bool    | (N, P)       | transforms, several robots: dims of the row's robot |
| `camera_mask`                  | bool    | (N, cameras) | transforms, several robots: cameras of the row's robot |
| `dataset`                      | int64   | (N,)         | transforms, several robots: `dataset_index` |
| `step_actions`                 | float32 | (N,)         | feed, evaluation: divisor of a masked loss |
| `loss_groups`                  | int64   | (N, groups)  | pipeline, training: the row's columns in the loss table |

Diffusion policies have one noise sample: `noise` (N, T, A) and `time` int64 (N,), a step of the
noise schedule. Policies with several observation steps have them as a second axis, newest last,
with a mask for steps before the episode: `observation.state` (N, O, S), `observation.state_is_pad`
(N, O). With --policy.keep_prefix, a training batch has `prefix` (N, tokens, width), float32 or
bfloat16, instead of images.
"""

from collections.abc import Mapping

import numpy as np

STATE = "observation.state"
ACTION = "action"
ACTION_IS_PAD = "action_is_pad"
IMAGE_PREFIX = "observation.images."
TOKENS = "observation.language.tokens"
TOKEN_MASK = "observation.language.attention_mask"
TASK = "task"
NOISE = "noise"
TIME = "time"
PREFIX = "prefix"
"""Outputs of the policy's frozen part, which replace images; see `data/frames/prefix_store.py`."""
SLOT = "slot"
"""Position of a sample in the run's order, independent of the number of workers."""
ACTION_DIM_MASK, CAMERA_MASK, DATASET = "action_dim_mask", "camera_mask", "dataset"
MIXTURE_KEYS = (ACTION_DIM_MASK, CAMERA_MASK, DATASET)
"""Columns that exist only for runs on several robots."""
LOSS_GROUPS = "loss_groups"
STEP_ACTIONS = "step_actions"
"""Valid actions of an average micro-batch of the row's optimizer step.

Dividing a masked loss by it gives the mean over the valid actions of the step, however its samples
are split over workers and micro-batches. With several robots, it is computed as if all rows were
from the row's dataset.
"""
IDS = ("dataset_index", "index", "episode_index", "frame_index")

Columns = dict[str, np.ndarray]
"""A block of rows as columns: the first axis of every array is the rows."""


def num_rows(columns: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(columns.values())))
