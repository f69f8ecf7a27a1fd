"""Sizes of models that LeRobot builds at its own sizes alone: checked numbers, the file that carries them, the swap of names.

LeRobot's policies take their widths from named variants, or from a hub. A `pretrained_model` folder of another size carries
it in SIZE_FILE beside config.json, and LeRobot's unchanged classes are built at it while names of their modules are replaced.
No torch, no LeRobot: sizes alone are read without.
"""

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from vlatune.files import parse_json, read_file
from vlatune.limits import check_limit

SIZE_FILE = "vlatune_size.json"

# One builder at a time: the names of a module belong to the whole process.
_building = threading.RLock()


@dataclass(frozen=True)
class ModelSize:
    """Every number that decides a parameter's shape: a subclass has them as fields."""

    title: ClassVar[str]
    """Whose size it is, for messages."""
    multiples: ClassVar[Mapping[str, str]]
    """Field -> the one that it must be a multiple of."""
    even: ClassVar[tuple[str, ...]]
    """Fields whose position code pairs two halves."""

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
    """The size that lies in a pretrained_model folder; None where there is no such file."""
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
    """While active, (module, name) -> what stands there instead. Other threads that replace names wait."""
    with _building:
        originals = {(module, name): getattr(module, name) for module, name in replaced}
        try:
            for (module, name), replacement in replaced.items():
                setattr(module, name, replacement)
            yield
        finally:
            for (module, name), original in originals.items():
                setattr(module, name, original)
