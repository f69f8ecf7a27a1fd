"""Save and load the samples shown in a report, as arrays and strings without pickle.

Held-out samples with observations, true and predicted actions are in RUN/eval_samples.npz, complete
episodes in RUN/eval_rollouts.npz, and samples of the first batch, with and without augmentation, in
RUN/first_batch.npz. Each is a single file, so that it is replaced atomically.
"""

import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.storage.files import open_file, write_atomic
from vlatune.storage.json_types import checked
from vlatune.storage.limits import check_limit

EVAL_SAMPLES_FILE, ROLLOUTS_FILE, FIRST_BATCH_FILE = "eval_samples.npz", "eval_rollouts.npz", "first_batch.npz"
MAX_SAMPLES_BYTES = 256 << 20
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, MemoryError, RecursionError)
DAMAGED += (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError)
"""Errors that NumPy and zipfile raise for damaged archives."""


@dataclass(frozen=True)
class EvalSample:
    episode_index: int
    frame_index: int
    task: str
    images: dict[str, np.ndarray]
    """Camera -> uint8 pixels, (3, H, W), at the model's input size."""
    true_TA: np.ndarray
    predicted_TA: np.ndarray
    valid_T: np.ndarray
    """False where the chunk extends past the end of the episode."""


@dataclass(frozen=True)
class TrainedSample:
    """Sample of the first batch."""

    episode_index: int
    frame_index: int
    task: str
    images: dict[str, np.ndarray]
    """Camera -> uint8 pixels, (3, H, W), without augmentation."""
    trained: dict[str, np.ndarray]
    """Augmented images; empty without augmentation."""


def save_samples(run_dir: Path, name: str, samples: Sequence[EvalSample | TrainedSample]) -> None:
    """Write RUN/`name`, replacing an older file."""
    described, arrays = [], {}
    for number, sample in enumerate(samples):
        described.append(strings := {})
        for field, value in vars(sample).items():
            if isinstance(value, dict):
                # Camera names are untrusted: store them as strings, not as names of zip members.
                strings[field] = list(value)
                arrays |= {f"{number}_{field}_{position}": image for position, image in enumerate(value.values())}
            elif isinstance(value, np.ndarray):
                arrays[f"{number}_{field}"] = value
            else:
                strings[field] = value
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, json=np.array(json.dumps(described, default=int)), **arrays)
    write_atomic(run_dir / name, [packed.getvalue()])


def load_samples[T: EvalSample | TrainedSample](run_dir: Path, name: str, kind: type[T]) -> list[T]:
    """Read and validate samples written by `save_samples`; empty if the file does not exist."""
    if not (run_dir / name).exists():
        return []
    try:
        with (
            open_file(run_dir, name, max_bytes=MAX_SAMPLES_BYTES) as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            unpacked = sum(member.file_size for member in arrays.zip.infolist())
            check_limit("run_array_bytes", unpacked, "its arrays unpack to bytes:")
            described = json.loads(str(arrays["json"]))
            return [_load_sample(number, strings, arrays, kind) for number, strings in enumerate(described)]
    except DAMAGED as error:
        raise RuntimeError(f"{run_dir / name}: cannot be read ({error}); delete the file") from error


def _load_sample[T: EvalSample | TrainedSample](number: int, strings: Any, arrays: Any, kind: type[T]) -> T:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.type in (int, str):
            values[field.name] = checked(strings[field.name], field.type, field.name)
        elif field.type is np.ndarray:
            values[field.name] = arrays[f"{number}_{field.name}"]
        else:
            names = checked(strings[field.name], tuple[str, ...], field.name)
            values[field.name] = {
                camera: _checked_image(arrays[f"{number}_{field.name}_{position}"])
                for position, camera in enumerate(names)
            }
    sample = kind(**values)
    if isinstance(sample, EvalSample):
        _check_actions(sample)
    return sample


def _check_actions(sample: EvalSample) -> None:
    true_TA, predicted_TA, valid_T = sample.true_TA, sample.predicted_TA, sample.valid_T
    fits = all(
        one.ndim == 2 and one.shape == true_TA.shape and one.dtype.kind == "f" for one in (true_TA, predicted_TA)
    )
    if not fits or valid_T.shape != true_TA.shape[:1] or valid_T.dtype != bool:
        raise ValueError("its actions are not (steps, dims) with a flag for each step")


def _checked_image(image: np.ndarray) -> np.ndarray:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"an image is {image.dtype} of shape {image.shape}, expected uint8 of (3, H, W)")
    return image
