"""Limits on untrusted files, checked from their headers before reading.

The defaults are far above real recordings, policies and runs, and keep allocations per file below about 1 GB. The
environment variable VLATUNE_LIMIT_SCALE multiplies them all, and error messages name the required value. On a
cluster, set it on every node.
"""

import math
import os

SCALE, MAX_DECODE_S = "VLATUNE_LIMIT_SCALE", "VLATUNE_MAX_DECODE_S"
LIMITS = {
    "json_values": 8_000_000,  # lists, objects and their items; Gemma's tokenizer.json has 2.3 million
    "json_depth": 64,
    "line_bytes": 16 << 20,  # one line of a JSON-lines file
    "parquet_footer_bytes": 64 << 20,
    "parquet_row_groups": 200_000,
    "parquet_rows": 20_000_000,  # per file: 185 hours at 30 fps
    "parquet_values": 100_000_000,  # one column of a row group
    "parquet_row_values": 4_000_000,  # one column of one row: a depth image has 300,000
    "parquet_unpacked_bytes": 64 << 20,  # one column with a compression ratio above UNPACKED_SHARE
    "text_chars": 20_000,  # one task
    "tasks": 1_000_000,
    "feature_values": 4_000_000,
    "episode_frames": 10_000_000,  # 92 hours at 30 fps
    "dataset_frames": 100_000_000,  # DROID has 27 million
    "image_side": 16_384,
    "image_pixels": 64_000_000,
    "video_frames": 5_000_000,  # per mp4 file: 46 hours at 30 fps
    "video_streams": 16,
    "video_header_bytes": 256 << 20,
    "policy_number": 65_536,  # chunk_size, max_action_dim, a side of image_resolution, etc.
    "sampling_steps": 1_000,  # denoising steps; ten are typical
    "model_depth": 512,
    "model_width": 1 << 20,
    "tokenizer_steps": 64,  # normalisers, pre-tokenisers and template parts
    "tokenizer_growth": 256,  # length ratio of normalised to original prompt
    "token_chars": 1_000,  # one added token: <loc0000> has 9
    "added_tokens": 100_000,  # Gemma has 6,400
    "listed_files": 10_000,  # of a base model below a URL
    "run_bytes": 4 << 30,  # a mirrored run folder, without checkpoints
    "run_records": 5_000_000,  # lines of metrics.jsonl
    "run_array_bytes": 512 << 20,  # one array in eval_samples.npz, uncompressed
}
DECODE_S = 600
"""Maximum seconds to decode the frames of one unit; one second is typical."""
UNPACKED_SHARE = 100
"""Maximum compression ratio of a large column."""


class TooMuchError(ValueError):
    """A file exceeds its limit."""


def limit(name: str) -> int:
    """Return a limit: VLATUNE_MAX_DECODE_S, or a default times VLATUNE_LIMIT_SCALE."""
    return _setting(MAX_DECODE_S, DECODE_S) if name == "decode_s" else LIMITS[name] * _setting(SCALE, 1)


def check_limit(name: str, found: float, what: str) -> None:
    """Raise if `found` exceeds the limit; `what` names the value, e.g. "info.json: the camera has a side of"."""
    if found <= limit(name):
        return
    shown = f"{found:,}" if isinstance(found, int) and found < 10**18 else str(found)[:30]
    scale = math.ceil(min(found, 10**18) / LIMITS.get(name, 1))
    raise TooMuchError(
        f"{what} {shown}, above the limit of {limit(name):,}; the file is damaged, or another file under this name; "
        f"if it is right, set {MAX_DECODE_S if name == 'decode_s' else SCALE}={scale}"
    )


def _setting(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ValueError(f"{variable}={text}: expected a whole number, e.g. {default}")
    return int(text)
