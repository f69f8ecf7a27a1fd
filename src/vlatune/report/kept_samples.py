"""Samples that a run keeps for its page, so that it can be rewritten without the model: arrays and strings, nothing pickled.

A few held-out samples, with what the model saw, what was done, and what it predicted, are in RUN/eval_samples.npz, whole
episodes in RUN/eval_rollouts.npz; samples of the first batch, with augmentation before and after it, in RUN/first_batch.npz. One
file each, so that a new one replaces the old in a single rename.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.files import open_file, write_aside
from vlatune.limits import check_limit

EVAL_SAMPLES_FILE, ROLLOUTS_FILE, FIRST_BATCH_FILE = "eval_samples.npz", "eval_rollouts.npz", "first_batch.npz"
MAX_SAMPLES_BYTES = 256 << 20
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, MemoryError, RecursionError)
DAMAGED += (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError)
"""What NumPy and zipfile raise for bytes that are no archive of arrays, or of others."""


@dataclass(frozen=True)
class EvalSample:
    episode_index: int
    frame_index: int
    task: str
    images: dict[str, np.ndarray]
    """Camera -> uint8 pixels, (3, H, W) or (H, W, 3), at the size the model sees."""
    true_TA: np.ndarray
    predicted_TA: np.ndarray
    valid_T: np.ndarray
    """False where the chunk reaches past the end of the episode."""


def save_eval_samples(run_dir: Path, samples: list[EvalSample], name: str = EVAL_SAMPLES_FILE) -> Path:
    """Write RUN/eval_samples.npz, replacing an older one."""
    arrays: dict[str, Any] = {"json": np.array(json.dumps([_strings(sample) for sample in samples]))}
    for number, sample in enumerate(samples):
        arrays |= {f"{number}_true": sample.true_TA, f"{number}_predicted": sample.predicted_TA}
        arrays[f"{number}_valid"] = sample.valid_T
        # Camera names come from the dataset: they are kept as strings, not as names of zip members.
        arrays |= {f"{number}_image_{place}": image for place, image in enumerate(sample.images.values())}
    return _save_arrays(Path(run_dir) / name, arrays)


def load_eval_samples(run_dir: Path, name: str = EVAL_SAMPLES_FILE) -> list[EvalSample]:
    """Read what `save_eval_samples` wrote."""
    return _load_arrays(run_dir, name, _sample, f"and run `vlatune eval {run_dir}` again")


def save_rollouts(run_dir: Path, rollouts: list[EvalSample]) -> Path:
    """Write RUN/eval_rollouts.npz: whole episodes, each with pictures of a few of its frames."""
    return save_eval_samples(run_dir, rollouts, ROLLOUTS_FILE)


def load_rollouts(run_dir: Path) -> list[EvalSample]:
    """Read what `save_rollouts` wrote; none where there are none."""
    return load_eval_samples(run_dir, ROLLOUTS_FILE) if (run_dir / ROLLOUTS_FILE).exists() else []


@dataclass(frozen=True)
class TrainedSample:
    """A sample of the first batch."""

    episode_index: int
    frame_index: int
    task: str
    images: dict[str, np.ndarray]
    """Camera -> uint8 pixels, (3, H, W), as they were read."""
    trained: dict[str, np.ndarray]
    """The same, as training sees them; empty where it sees them as they were read."""

    @property
    def is_augmented(self) -> bool:
        return bool(self.trained)


def save_first_batch(run_dir: Path, samples: list[TrainedSample]) -> Path:
    """Write RUN/first_batch.npz, replacing an older one."""
    arrays: dict[str, Any] = {"json": np.array(json.dumps([_strings(sample) for sample in samples]))}
    for number, sample in enumerate(samples):
        for place, camera in enumerate(sample.images):
            arrays[f"{number}_image_{place}"] = sample.images[camera]
            if sample.is_augmented:
                arrays[f"{number}_trained_{place}"] = sample.trained[camera]
    return _save_arrays(Path(run_dir) / FIRST_BATCH_FILE, arrays)


def load_first_batch(run_dir: Path) -> list[TrainedSample]:
    """Read what `save_first_batch` wrote."""
    return _load_arrays(run_dir, FIRST_BATCH_FILE, _trained_sample, "(a run writes it when it begins)")


def _save_arrays(path: Path, arrays: dict[str, Any]) -> Path:
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    write_aside(path, [packed.getvalue()])
    return path


def _load_arrays[T](run_dir: Path, name: str, make: Callable[[int, dict[str, Any], Any], T], remedy: str) -> list[T]:
    try:
        with (
            open_file(run_dir, name, max_bytes=MAX_SAMPLES_BYTES) as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            unpacked = sum(member.file_size for member in arrays.zip.infolist())
            check_limit("run_array_bytes", unpacked, "its arrays unpack to bytes:")
            described = json.loads(str(arrays["json"]))
            return [make(number, strings, arrays) for number, strings in enumerate(described)]
    except DAMAGED as error:
        raise RuntimeError(f"{Path(run_dir) / name}: cannot be read ({error}); delete it {remedy}") from error


def _trained_sample(number: int, strings: dict[str, Any], arrays: Any) -> TrainedSample:
    cameras = list(enumerate(strings["cameras"]))
    sample = TrainedSample(
        episode_index=int(strings["episode_index"]),
        frame_index=int(strings["frame_index"]),
        task=strings["task"],
        images={camera: arrays[f"{number}_image_{place}"] for place, camera in cameras},
        trained={camera: arrays[f"{number}_trained_{place}"] for place, camera in cameras}
        if f"{number}_trained_0" in arrays
        else {},
    )
    _check_pictures(sample.task, sample.images)
    _check_pictures(sample.task, sample.trained)
    return sample


def _strings(sample: EvalSample | TrainedSample) -> dict[str, Any]:
    return {
        "episode_index": int(sample.episode_index),
        "frame_index": int(sample.frame_index),
        "task": sample.task,
        "cameras": list(sample.images),
    }


def _sample(number: int, strings: dict[str, Any], arrays: Any) -> EvalSample:
    sample = EvalSample(
        episode_index=strings["episode_index"],
        frame_index=strings["frame_index"],
        task=strings["task"],
        images={camera: arrays[f"{number}_image_{place}"] for place, camera in enumerate(strings["cameras"])},
        true_TA=arrays[f"{number}_true"],
        predicted_TA=arrays[f"{number}_predicted"],
        valid_T=arrays[f"{number}_valid"],
    )
    _check_sample(sample)
    return sample


def _check_sample(sample: EvalSample) -> None:
    """Of the kinds and shapes that `save_eval_samples` writes."""
    actions = (sample.true_TA, sample.predicted_TA)
    fits = all(one.ndim == 2 and one.shape == actions[0].shape and one.dtype.kind == "f" for one in actions)
    if not fits or sample.valid_T.shape != actions[0].shape[:1] or sample.valid_T.dtype != bool:
        raise ValueError("its actions are not (steps, dims) with a flag for each step")
    _check_pictures(sample.task, sample.images)


def _check_pictures(task: Any, images: dict[str, np.ndarray]) -> None:
    if not all(isinstance(text, str) for text in (task, *images)):
        raise ValueError("a sentence or the name of a camera is no text")
    for image in images.values():
        if image.dtype != np.uint8 or image.ndim != 3 or 3 not in (image.shape[0], image.shape[2]):
            raise ValueError(f"a picture is {image.dtype} of shape {image.shape}, expected uint8 of (3, H, W)")
