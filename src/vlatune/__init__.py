"""Fine-tune vision-language-action robot policies on LeRobot datasets with Ray Data and Ray Train."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlatune.feed.read_lerobot import read_lerobot
    from vlatune.feed.read_plan import plan_read

__version__ = "0.1.0"
__all__ = ["__version__", "plan_read", "read_lerobot"]

_HOMES = {"read_lerobot": "vlatune.feed.read_lerobot", "plan_read": "vlatune.feed.read_plan"}
"""Public names imported on first use, so that `import vlatune` stays cheap."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vlatune' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
