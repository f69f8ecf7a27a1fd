"""The page of JSON in a checkpoint, readable without torch."""

import json
from pathlib import Path
from typing import Any

STATE = "state.json"


def read_json_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_bytes())


def stored_lanes(folder: Path) -> int:
    """The order's number of lanes, which stays with the run whatever the number of workers."""
    return int(read_json_state(folder)["lanes"])
