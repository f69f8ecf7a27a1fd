"""The safetensors files of a base model: which tensors they hold, and whether those are the model's. No torch: the driver
looks before anything is started.

Only headers are read. LeRobot's loader prints a line about tensors that are missing or do not fit and goes on with random
weights; here every one of them is an error.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vlatune.files import read_file, real_path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    key: str
    """Its name in the file, which may be an older one than the model's."""
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.exists():
        return [folder / SINGLE_FILE]
    try:
        names = sorted(set(json.loads(read_file(folder, INDEX_FILE))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"policy '{folder}': {INDEX_FILE} is damaged ({error}); fetch the base model anew") from error
    odd = [name for name in names if Path(str(name)).name != name]
    if odd:
        raise ValueError(f"policy '{folder}': {INDEX_FILE} names '{odd[0]}', expected a file of the same folder")
    return [folder / name for name in names]


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """All of them, file by file."""
    for file in weight_files(folder):
        try:
            with safe_open(real_path(folder, file.name), framework="np") as tensors:
                for key in tensors.keys():  # noqa: SIM118  (it is no dict)
                    yield StoredTensor(file, key, tuple(tensors.get_slice(key).get_shape()))
        except FileNotFoundError as error:
            raise ValueError(f"policy '{folder}': {file.name} is missing; fetch the base model anew") from error
        except SafetensorError as error:
            raise ValueError(
                f"policy '{folder}': {file.name} is damaged ({error}); fetch the base model anew"
            ) from error


def stored_shapes(folder: Path) -> Shapes:
    """Name -> shape of every stored tensor."""
    return {one.key: one.shape for one in stored_tensors(folder)}


def check_tensors(folder: Path, wanted: Shapes, found: Mapping[str, StoredTensor], title: str) -> None:
    """Every tensor is there in its shape, and no other; `title` is what people call the policy."""
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"policy '{folder}': the weights do not fit the model: {len(missing)} missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}; is it a {title} base of another size or version?"
        )
    for name, stored in found.items():
        if stored.shape != wanted[name]:
            raise ValueError(
                f"policy '{folder}': the weights do not fit the model: '{name}' in {stored.file.name} has shape "
                f"{stored.shape}, expected {wanted[name]}; is it a {title} base of another size or version?"
            )


def linear_shapes(name: str, outputs: int, inputs: int) -> Shapes:
    """Of a linear layer with a bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm_shapes(name: str, width: int) -> Shapes:
    """Of a LayerNorm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def tower_layer_shapes(layer: str, width: int, mlp_dim: int) -> Shapes:
    """Of one layer of a SigLIP tower."""
    shapes = norm_shapes(f"{layer}layer_norm1", width) | norm_shapes(f"{layer}layer_norm2", width)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        shapes |= linear_shapes(f"{layer}self_attn.{name}", width, width)
    return shapes | linear_shapes(f"{layer}mlp.fc1", mlp_dim, width) | linear_shapes(f"{layer}mlp.fc2", width, mlp_dim)
