"""Model sizes: validated dimensions, the file that stores them, and building LeRobot at a size.

LeRobot takes model dimensions from named variants or from the hub. A `pretrained_model` folder of
another size stores it in SIZE_FILE beside config.json; LeRobot's unchanged classes are built at
that size while names in their modules are replaced. Reading sizes needs neither torch nor LeRobot.
"""

import dataclasses
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from vlatune.storage.files import parse_json, read_file
from vlatune.storage.limits import check_limit

SIZE_FILE = "vlatune_size.json"

# Replaced module attributes are process-wide: build one model at a time.
_building = threading.RLock()


@dataclass(frozen=True)
class ModelSize:
    """All numbers that determine parameter shapes; subclasses set the published values."""

    title: ClassVar[str]
    """Model name, for messages."""
    modules: ClassVar[tuple[str, ...]]
    """LeRobot's modules that build the model."""
    replaced: ClassVar[tuple[str, ...]]
    """Names that `use_size` replaces in a module."""
    use_size: ClassVar[Callable[[Any, dict[str, int]], None]]
    """Make a module of LeRobot build models of a size; uses only its arguments, for model cards."""

    width: int
    """Hidden size of the language model; a multiple of its heads."""
    depth: int
    """Layers of the language model."""
    mlp_dim: int
    """Hidden size of the language model's MLP."""
    head_dim: int
    """Attention head size of language model and action expert; even."""
    vision_width: int
    """Hidden size of the vision tower; a multiple of vision_heads."""
    vision_depth: int
    """Layers of the vision tower."""
    vision_mlp_dim: int
    """Hidden size of the vision tower's MLP."""
    vision_heads: int
    """Attention heads of the vision tower."""
    patch_size: int
    """Patch side in pixels."""
    vocab_size: int
    """Rows of the token embedding."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{self.title}'s size: {field.name}={value!r}: must be an integer above 0")
            check_limit("model_depth" if "depth" in field.name else "model_width", value, f"{field.name}:")
        if self.head_dim % 2:
            raise ValueError(f"{self.title}'s size: head_dim={self.head_dim}: must be even, for rotary embeddings")
        if self.vision_width % self.vision_heads:
            raise ValueError(
                f"{self.title}'s size: vision_width={self.vision_width}: must be a multiple of "
                f"vision_heads={self.vision_heads}"
            )


def read_size_file[S: ModelSize](folder: Path, size_class: type[S]) -> S | None:
    """Read the size file of a pretrained_model folder; None if there is none."""
    path = folder / SIZE_FILE
    if not path.exists():
        return None
    values, names = (
        parse_json(read_file(folder, SIZE_FILE), str(path)),
        {one.name for one in dataclasses.fields(size_class)},
    )
    if not isinstance(values, dict) or values.keys() != names:
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{path}: a {size_class.title}'s size needs exactly {sorted(names)}, found {found}")
    try:
        return size_class(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_size(folder: Path, size: ModelSize) -> None:
    (folder / SIZE_FILE).write_text(json.dumps(dataclasses.asdict(size), indent=2) + "\n")


@contextmanager
def building_at(size: ModelSize) -> Iterator[None]:
    """Construct LeRobot's policies at this size and without the hub, also by from_pretrained.

    Other threads that enter wait; threads that build outside of it are affected.
    """
    with _building:
        modules = [import_module(name) for name in size.modules]
        originals = [(module, name, getattr(module, name)) for module in modules for name in size.replaced]
        try:
            for module in modules:
                type(size).use_size(module, dataclasses.asdict(size))
            yield
        finally:
            for module, name, original in originals:
                setattr(module, name, original)


def loading_code(size: ModelSize, module: str) -> str:
    """Return Python code that applies `use_size` to a module of LeRobot; for a model card."""
    package, _, name = module.rpartition(".")
    function = inspect.getsource(type(size).use_size)
    values = dataclasses.asdict(size)
    return f"from typing import Any\n\nfrom {package} import {name} as lerobot\n\n\n{function}\n\nuse_size(lerobot, {values})"
