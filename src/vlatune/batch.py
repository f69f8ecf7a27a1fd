"""The sample contract: every key that travels from the reader to the policy, with its dtype and shape.

Shape letters, used as suffixes of names throughout: B batch, N rows, T action horizon, A action dims,
S state dims, P padded dims of the policy, K flow samples, L prompt tokens, C channels, H height, W width.

| key                            | dtype   | shape        | made by                         |
|--------------------------------|---------|--------------|---------------------------------|
| `observation.images.*`         | uint8   | (N, 3, H, W) | reader, at the policy's size    |
| `observation.state`            | float32 | (N, S)       | reader; normalised by transforms|
| `action`                       | float32 | (N, T, A)    | reader; normalised by transforms|
| `action_is_pad`                | bool    | (N, T)       | reader                          |
| `task`                         | str     | (N,)         | reader; gone after tokenising   |
| `observation.language.tokens`  | int64   | (N, L)       | transforms                      |
| `observation.language.attention_mask` | bool | (N, L)   | transforms                      |
| `noise`                        | float32 | (N, K, T, P) | transforms, pure in (seed, place in the order) |
| `time`                         | float32 | (N, K)       | transforms, likewise            |
| `dataset_index`, `index`, `episode_index`, `frame_index` | int64 | (N,) | reader     |
| `timestamp`                    | float32 | (N,)         | reader                          |
| `slot`                         | int64   | (N,)         | plan: place in the run's order    |
| `action_dim_mask`              | bool    | (N, P)       | transforms, of several robots: dims that the row's robot has |
| `camera_mask`                  | bool    | (N, cameras) | likewise: cameras that it has   |
| `dataset`                      | int64   | (N,)         | likewise: `dataset_index`, for the device |
| `loss_groups`                  | int64   | (N, groups)  | pipeline, in training: the row's columns in the table of losses |

A policy that learns by diffusion has one draw: `noise` (N, T, A) and `time` int64 (N,), a step of its noise schedule.
Observations of a policy that looks at several at once have them as a second axis, the newest last, with a mask of those
before the episode's first: `observation.state` (N, O, S) and `observation.state_is_pad` (N, O). With --policy.keep_features
training has what was kept of a picture in place of it, of the policy's shape: float32, or bfloat16 as its bits in int16.
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
SLOT = "slot"
"""Place in the run's order: optimizer step by optimizer step, lane by lane, whatever the number of workers."""
ACTION_DIM_MASK, CAMERA_MASK, DATASET = "action_dim_mask", "camera_mask", "dataset"
MIXTURE_KEYS = (ACTION_DIM_MASK, CAMERA_MASK, DATASET)
"""Columns of rows of several robots; others do not have them."""
LOSS_GROUPS = "loss_groups"
IDS = ("dataset_index", "index", "episode_index", "frame_index")

Columns = dict[str, np.ndarray]
"""A block of rows as columns: every array has the rows as its first axis."""


def num_rows(columns: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(columns.values())))


def check_columns(columns: Mapping[str, np.ndarray], expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Hold columns to a table of key -> (dtype, shape of one row); the message names the key and both sides."""
    for key, (dtype, shape) in expected.items():
        if key not in columns:
            raise ValueError(f"sample key '{key}' is missing; there are: {', '.join(sorted(columns))}")
        array = columns[key]
        if array.dtype != np.dtype(dtype) or array.shape[1:] != shape:
            raise ValueError(
                f"sample key '{key}': expected {dtype} rows of shape {shape}, got {array.dtype} of {array.shape[1:]}"
            )
