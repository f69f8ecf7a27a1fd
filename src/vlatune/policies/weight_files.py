"""Read the headers of a base model's safetensors files, and check them against the model.

LeRobot's loader only logs missing or mismatched tensors and continues with random weights; here
they raise. Does not import torch, so the driver can check before workers start.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vlatune.storage.files import read_file, real_path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

RESNET_STAGE = re.compile(r"\.backbone\.(?:layer(\d)|([4-7]))\.")
"""Name of a tensor in a ResNet's stage 1 to 4, in ACT or Diffusion Policy."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    key: str
    """Name in the file, which may be an older one than the model's."""
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / SINGLE_FILE]
    try:
        names = sorted(set(json.loads(read_file(folder, INDEX_FILE))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"policy '{folder}': {INDEX_FILE} is damaged ({error}); download the base model again"
        ) from error
    odd = [name for name in names if Path(str(name)).name != name]
    if odd:
        raise ValueError(f"policy '{folder}': {INDEX_FILE} names '{odd[0]}', expected a file of the same folder")
    return [folder / name for name in names]


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Yield all tensors, file by file."""
    for file in weight_files(folder):
        try:
            with safe_open(real_path(folder, file.name), framework="np") as tensors:
                for key in tensors.keys():  # noqa: SIM118  (it is no dict)
                    yield StoredTensor(file, key, tuple(tensors.get_slice(key).get_shape()))
        except FileNotFoundError as error:
            raise ValueError(f"policy '{folder}': {file.name} is missing; download the base model again") from error
        except SafetensorError as error:
            raise ValueError(
                f"policy '{folder}': {file.name} is damaged ({error}); download the base model again"
            ) from error


def count_flops(
    folder: Path, uses: Mapping[str, float], *, image_hw: tuple[int, int] = (1, 1), num_images: int = 0
) -> float:
    """Estimate the operations of a training step per sample: two per weight and use forward, four backward.

    `uses` maps patterns of tensor names to uses per sample (default: 1); the first match counts. ResNet weights
    (".backbone.") are used for every position of the feature map after them.
    """
    total = 0.0
    for stored in stored_tensors(folder):
        number = next((one for pattern, one in uses.items() if re.search(pattern, stored.key)), 1.0)
        if ".backbone." in stored.key:
            stage = RESNET_STAGE.search(stored.key)
            stride = 2 ** (int(stage[1] or int(stage[2]) - 3) + 1) if stage else 2
            number = num_images * math.prod(side / stride for side in image_hw)
        total += math.prod(stored.shape) * number if len(stored.shape) > 1 else 0.0
    return 6.0 * total


def check_tensors(folder: Path, wanted: Shapes, found: Mapping[str, StoredTensor], title: str) -> None:
    """Raise unless names and shapes match exactly; `title` is the policy's display name."""
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"policy '{folder}': the weights do not match the model: {len(missing)} missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}; is it a {title} base of another size or version?"
        )
    check_shapes(folder, wanted, found, title)


def check_shapes(folder: Path, wanted: Shapes, found: Mapping[str, StoredTensor], title: str) -> None:
    """Raise unless all wanted tensors exist with their shapes."""
    for name, shape in wanted.items():
        stored = found.get(name)
        if stored is None or stored.shape != shape:
            has = "is missing" if stored is None else f"in {stored.file.name} has shape {stored.shape}"
            raise ValueError(
                f"policy '{folder}': the weights do not match the model: '{name}' {has}, expected shape {shape}; "
                f"is it a {title} base of another size or version?"
            )
