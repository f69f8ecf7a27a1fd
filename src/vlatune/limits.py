"""What a file of a stranger may ask for, looked up in its header before it is read: one table, each line a setting.

The defaults are far above what recordings, policies and runs have, and keep what one file can make us allocate below
about a GB. Whoever has a larger one sets the variable that the message names, `VLATUNE_MAX_PARQUET_ROWS=...`; with a
cluster of your own, on every node.
"""

import os
from typing import Any

LIMITS = {
    "json_values": 8_000_000,  # lists, objects and what is in them; Gemma's tokenizer.json has 2.3 million
    "json_depth": 64,
    "line_bytes": 16 << 20,  # of a JSON-lines file; statistics of an episode have some 10 kB
    "parquet_footer_bytes": 64 << 20,
    "parquet_row_groups": 200_000,
    "parquet_rows": 20_000_000,  # of one file: 185 hours at 30 fps
    "parquet_values": 100_000_000,  # of one column of a row group
    "parquet_row_values": 4_000_000,  # of one column in one row: a depth picture has 300,000
    "parquet_unpacked_bytes": 64 << 20,  # of a column of a row group that unpacks to more than a hundred times its size
    "text_chars": 20_000,  # of a task's sentence
    "tasks": 1_000_000,
    "feature_values": 4_000_000,
    "picture_side": 16_384,
    "picture_pixels": 64_000_000,
    "episode_frames": 10_000_000,  # 92 hours at 30 fps
    "dataset_frames": 100_000_000,  # DROID has 27 million
    "video_frames": 5_000_000,  # of one mp4 file: 46 hours at 30 fps
    "video_streams": 16,
    "video_header_bytes": 256 << 20,
    "decode_s": 600,  # for the frames of one unit of work, some 32 of an episode; a second is usual
    "policy_number": 65_536,  # chunk_size, max_action_dim, a side of image_resolution and the like
    "model_depth": 512,
    "model_width": 1 << 20,
    "tokenizer_steps": 64,  # normalisers, pre-tokenisers and parts of a template
    "tokenizer_growth": 256,  # how many times longer normalisers may make a prompt
    "run_records": 5_000_000,  # lines of metrics.jsonl
    "run_array_bytes": 512 << 20,  # of one array in eval_samples.npz, unpacked
}
UNPACKED_SHARE = 100
"""How many times its size a large column may unpack to."""


class TooMuchError(ValueError):
    """A file that asks for more than its cap."""


def limit(name: str) -> int:
    """The cap of that name: the user's, or the default."""
    variable = _variable(name)
    text = os.environ.get(variable)
    if text is None:
        return LIMITS[name]
    if not text.isdecimal():
        raise ValueError(f"{variable}={text}: expected a whole number, as {LIMITS[name]}")
    return int(text)


def check_limit(name: str, found: float, what: str) -> None:
    """Refuse `found` above the cap; `what` names file and thing, as "info.json: the camera has sides of"."""
    most = limit(name)
    if found > most:
        raise TooMuchError(
            f"{what} {_shown(found)}, more than the {most:,} that are read; it is damaged or not what its name says; if it "
            f"is right, set {_variable(name)}={_shown(found).replace(',', '')}"
        )


def _variable(name: str) -> str:
    return f"VLATUNE_MAX_{name.upper()}"


def _shown(found: Any) -> str:
    return f"{found:,}" if isinstance(found, int) and abs(found) < 10**18 else f"{str(found)[:30]}"
