"""Read the headers of a base model's safetensors files, and check them against the model.

LeRobot's loader only logs missing or mismatched tensors and continues with random weights; here
they raise. Does not import torch, so the driver can check before workers start.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vlatune.storage.files import read_file, real_path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

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


def stored_shapes(folder: Path) -> Shapes:
    return {one.key: one.shape for one in stored_tensors(folder)}


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
