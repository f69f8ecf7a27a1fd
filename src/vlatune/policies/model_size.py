"""Model sizes: validated dimensions, the file that stores them, and building LeRobot at a size.

LeRobot takes model dimensions from named variants or from the hub. A `pretrained_model` folder of
another size stores it in SIZE_FILE beside config.json; LeRobot's unchanged classes are built at
that size while names in their modules are patched. Reading sizes needs neither torch nor LeRobot.
"""

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from vlatune.storage.files import parse_json, read_file
from vlatune.storage.limits import check_limit

SIZE_FILE = "vlatune_size.json"

# Patched module attributes are process-wide: build one model at a time.
_building = threading.RLock()


@dataclass(frozen=True)
class ModelSize:
    """All numbers that determine parameter shapes; subclasses define them as fields."""

    title: ClassVar[str]
    """Model name, for messages."""
    multiples: ClassVar[Mapping[str, str]]
    """Maps a field to the field that it must be a multiple of."""
    even: ClassVar[tuple[str, ...]]
    """Fields that must be even, because position embeddings pair two halves."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            self._require(is_count, f"{field.name}={value!r}: must be an integer above 0")
            check_limit("model_depth" if "depth" in field.name else "model_width", value, f"{field.name}:")
        for name, of in self.multiples.items():
            value, divisor = getattr(self, name), getattr(self, of)
            self._require(value % divisor == 0, f"{name}={value}: must be a multiple of {of}={divisor}")
        for name in self.even:
            value = getattr(self, name)
            self._require(value % 2 == 0, f"{name}={value}: must be even (its position code pairs two halves)")

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.title}'s size: {message}")

    def to_json(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, expected an object")
        if values.keys() != names:
            unknown, missing = sorted(values.keys() - names), sorted(names - values.keys())
            raise ValueError(
                f"a {cls.title}'s size needs exactly {sorted(names)}; unknown: {unknown}, missing: {missing}"
            )
        return cls(**values)


def read_size_file[S: ModelSize](folder: Path, size_class: type[S]) -> S | None:
    """Read the size file of a pretrained_model folder; None if there is none."""
    path = folder / SIZE_FILE
    if not path.exists():
        return None
    try:
        return size_class.from_json(parse_json(read_file(folder, SIZE_FILE), "it"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write_size(folder: Path, size: ModelSize) -> None:
    (folder / SIZE_FILE).write_text(json.dumps(size.to_json(), indent=2) + "\n")


@contextmanager
def replaced_names(replaced: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Patch (module, name) with a replacement while active; other threads wait."""
    with _building:
        originals = {(module, name): getattr(module, name) for module, name in replaced}
        try:
            for (module, name), replacement in replaced.items():
                setattr(module, name, replacement)
            yield
        finally:
            for (module, name), original in originals.items():
                setattr(module, name, original)
