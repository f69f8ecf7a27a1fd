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
from typing import Any, ClassVar

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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{self.title}'s size: {field.name}={value!r}: must be an integer above 0")
            check_limit("model_depth" if "depth" in field.name else "model_width", value, f"{field.name}:")


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
