"""A few held-out samples with what the model saw, what was done, and what it predicted.

They are kept in RUN/eval_samples.npz so that the page can be rewritten without the model. One file, arrays and strings
together, so that a new evaluation replaces the old one in a single rename; nothing in it is pickled.
"""

import io
import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.files import open_file, write_aside
from vlatune.limits import check_limit

FILE_NAME = "eval_samples.npz"
MAX_BYTES = 256 << 20
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


def save_eval_samples(run_dir: Path, samples: list[EvalSample]) -> Path:
    """Write RUN/eval_samples.npz, replacing an older one."""
    arrays: dict[str, Any] = {"json": np.array(json.dumps([_strings(sample) for sample in samples]))}
    for number, sample in enumerate(samples):
        arrays |= {f"{number}_true": sample.true_TA, f"{number}_predicted": sample.predicted_TA}
        arrays[f"{number}_valid"] = sample.valid_T
        # Camera names come from the dataset: they are kept as strings, not as names of zip members.
        arrays |= {f"{number}_image_{place}": image for place, image in enumerate(sample.images.values())}
    packed = io.BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    path = Path(run_dir) / FILE_NAME
    write_aside(path, [packed.getvalue()])
    return path


def load_eval_samples(run_dir: Path) -> list[EvalSample]:
    """Read what `save_eval_samples` wrote."""
    path = Path(run_dir) / FILE_NAME
    try:
        with open_file(run_dir, FILE_NAME, max_bytes=MAX_BYTES) as file, np.load(file, allow_pickle=False) as arrays:
            unpacked = sum(member.file_size for member in arrays.zip.infolist())
            check_limit("run_array_bytes", unpacked, "its arrays unpack to bytes:")
            described = json.loads(str(arrays["json"]))
            return [_sample(number, strings, arrays) for number, strings in enumerate(described)]
    except DAMAGED as error:
        raise RuntimeError(
            f"{path}: cannot be read ({error}); delete it and run `vlatune eval {run_dir}` again"
        ) from error


def _strings(sample: EvalSample) -> dict[str, Any]:
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
    texts = (sample.task, *sample.images)
    actions = (sample.true_TA, sample.predicted_TA)
    fits = all(one.ndim == 2 and one.shape == actions[0].shape and one.dtype.kind == "f" for one in actions)
    if not fits or sample.valid_T.shape != actions[0].shape[:1] or sample.valid_T.dtype != bool:
        raise ValueError("its actions are not (steps, dims) with a flag for each step")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a sentence or the name of a camera is no text")
    for image in sample.images.values():
        if image.dtype != np.uint8 or image.ndim != 3 or 3 not in (image.shape[0], image.shape[2]):
            raise ValueError(f"a picture is {image.dtype} of shape {image.shape}, expected uint8 of (3, H, W)")
