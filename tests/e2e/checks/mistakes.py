"""Common mistakes: each function changes a copy of an intact dataset and base model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file, save_file

WRIST = "observation.images.wrist"


def edit(file: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def misname_camera(root: Path, base: Path) -> None:
    del base
    old, new = WRIST, "observation.images.wrst"
    (root / "videos" / old).rename(root / "videos" / new)
    edit(root / "meta/info.json", lambda info: info["features"].update({new: info["features"].pop(old)}))
    edit(root / "meta/stats.json", lambda stats: stats.update({new: stats.pop(old)}))
    for file in (root / "meta/episodes").rglob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([name.replace(old, new) for name in table.column_names]), file)


def remove_horizon(root: Path, base: Path) -> None:
    del root
    edit(base / "config.json", lambda config: config.pop("chunk_size"))


def flatten_quantiles(root: Path, base: Path) -> None:
    del base

    def change(stats: Any) -> None:
        stats["action"]["q99"][0] = stats["action"]["q01"][0]

    edit(root / "meta/stats.json", change)


def change_fps(root: Path, base: Path) -> None:
    del base
    edit(root / "meta/info.json", lambda info: info.update(fps=30))


def remove_tensor(root: Path, base: Path) -> None:
    del root
    tensors = load_file(base / "model.safetensors")
    del tensors["model.action_out_proj.weight"]
    save_file(tensors, base / "model.safetensors")


def insert_nan(root: Path, base: Path) -> None:
    del base
    file = max((root / "data").rglob("*.parquet"))
    table = pq.read_table(file)
    action = np.array(table.column("action").to_pylist(), np.float32)
    action[len(action) // 2, 1] = np.nan
    at = table.column_names.index("action")
    column = pa.FixedSizeListArray.from_arrays(pa.array(action.reshape(-1)), action.shape[1])
    pq.write_table(table.set_column(at, "action", column.cast(table.schema.field("action").type)), file)


def shorten_prompts(root: Path, base: Path) -> None:
    del root

    def change(steps: Any) -> None:
        for step in steps["steps"]:
            if step["registry_name"] == "tokenizer_processor":
                step["config"]["max_length"] = 8

    edit(base / "policy_preprocessor.json", change)


def nothing(root: Path, base: Path) -> None:
    del root, base
