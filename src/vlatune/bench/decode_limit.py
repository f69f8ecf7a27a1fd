"""The limit: what plain PyAV decodes on these cores, with nothing around it."""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import av

from vlatune.dataset.meta import DatasetMeta


def decode_rows_per_s(meta: DatasetMeta, *, to_rgb: bool, threads: int, passes: int = 1) -> float:
    """Rows (one frame of every camera) per second: each episode and camera is one task, decoded from its start."""
    tasks = [(position, camera) for position in range(len(meta.episodes)) for camera in meta.cameras] * passes
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        frames = sum(pool.map(partial(_decode_episode, meta, to_rgb), tasks))
    rows = frames / len(meta.cameras)
    assert rows == meta.num_frames * passes, f"decoded {rows} rows of {meta.num_frames * passes}"
    return rows / (time.perf_counter() - begin)


def episode_frames(meta: DatasetMeta, position: int, camera: str, *, threads: int) -> Iterator[Any]:
    """Decoded frames of one episode and camera, by seeking to its start and going forward."""
    from_s = float(meta.episodes.videos[camera].from_s[position])
    container: Any = av.open(meta.root.join(meta.video_path(position, camera)))
    with container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = threads
        container.seek(round(from_s / stream.time_base), stream=stream, backward=True)
        at_or_after = (f for f in container.decode(stream) if float(f.pts * stream.time_base) >= from_s - 1e-4)
        yield from itertools.islice(at_or_after, int(meta.episodes.length[position]))


def _decode_episode(meta: DatasetMeta, to_rgb: bool, task: tuple[int, str]) -> int:
    frames = 0
    for frame in episode_frames(meta, *task, threads=1):
        if to_rgb:
            frame.to_ndarray(format="rgb24")
        frames += 1
    return frames
