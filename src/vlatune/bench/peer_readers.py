"""[ray] What the benchmarks of data share: datasets of video, a cluster, plain PyAV (the limit), the peers' ways to read.

Each peer is called the way its users call it. `read_as_template` follows the public template's pipeline as described: a
file group per task, full-size frames as rows of HWC arrays, then a map that turns them into CHW float32. The others call
the peer's own code.
"""

import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from vlatune.bench.harness import CannotRunError
from vlatune.bench.options import FeedBench, ReaderBench
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.storage.parquet import opened
from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset
from vlatune.ray_internals import init_options, make_block


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


ACTION_HORIZON = 50


def require_torchcodec() -> None:
    try:
        import torchcodec  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        raise CannotRunError("torchcodec finds no FFmpeg shared libraries on this system") from error


@dataclass(frozen=True)
class Read:
    """One pass through a Ray Dataset."""

    rows: int
    bytes: int
    """Of its blocks, as they lay in the object store."""
    first_row_s: float
    seconds: float

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


def consume(dataset: Any) -> Read:
    """Go through a Ray Dataset block by block and drop it."""
    begin, first_s, rows, size = time.perf_counter(), 0.0, 0, 0
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        first_s = first_s or time.perf_counter() - begin
        rows += batch.num_rows
        size += batch.nbytes
    return Read(rows, size, first_s, time.perf_counter() - begin)


def some_episodes(meta: DatasetMeta) -> list[int]:
    """Positions of two episodes in three, so that every file has a part."""
    return [position for position in range(len(meta.episodes)) if position % 3 < 2]


def read_as_ray(meta: DatasetMeta, positions: list[int]) -> Read:
    """`ray.data.read_lerobot` with an action window, as its documentation shows."""
    require_torchcodec()
    deltas = {"action": [offset / meta.fps for offset in range(ACTION_HORIZON)]}
    episodes = meta.episodes.index[positions].tolist()
    return consume(ray.data.read_lerobot(meta.root.path, episodes=episodes, delta_timestamps=deltas))


def lerobot_rows_per_s(meta: DatasetMeta, *, shuffle: bool, workers: int, max_rows: int) -> float:
    """`LeRobotDataset` behind a torch DataLoader, as `lerobot-train` has it."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from torch.utils.data import DataLoader, Subset

    require_torchcodec()
    deltas = {"action": [offset / meta.fps for offset in range(ACTION_HORIZON)]}
    dataset = LeRobotDataset("bench/reader", root=meta.root.path, delta_timestamps=deltas, video_backend="torchcodec")
    order = np.random.default_rng(0).permutation(len(dataset)) if shuffle else np.arange(len(dataset))
    subset = Subset(dataset, order[:max_rows].tolist())
    loader = DataLoader(subset, batch_size=8, num_workers=workers, prefetch_factor=2, multiprocessing_context="spawn")
    batches = iter(loader)
    next(batches)  # the workers' start is not charged
    begin = time.perf_counter()
    rows = sum(len(batch["index"]) for batch in batches)
    return rows / (time.perf_counter() - begin)


def read_as_template(meta: DatasetMeta, positions: list[int]) -> Read:
    to_float: Any = partial(to_float_chw, list(meta.cameras))
    read = ray.data.read_datasource(TemplateSource(meta, positions))
    return consume(read.map_batches(to_float, batch_size=8, batch_format="numpy"))


class TemplateSource(Datasource):
    """A read task per group of files; one row at a time."""

    def __init__(self, meta: DatasetMeta, positions: list[int]) -> None:
        super().__init__()
        self._meta, self._positions = meta, positions

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context=None
    ) -> list[ReadTask]:
        groups: dict[tuple[str, ...], list[int]] = {}
        for position in self._positions:
            files = tuple(self._meta.video_path(position, camera) for camera in self._meta.cameras)
            groups.setdefault(files, []).append(position)
        return [self._make_task(positions) for positions in groups.values()]

    def _make_task(self, positions: list[int]) -> ReadTask:
        meta = self._meta
        rows = int(meta.episodes.length[positions].sum())
        return ReadTask(lambda: _template_rows(meta, positions), BlockMetadata(rows, None, None, None))


def _template_rows(meta: DatasetMeta, positions: list[int]) -> Iterable[Any]:
    """One small table per row: values boxed one by one, every camera's frame at full size."""
    for position in positions:
        with opened(meta.root, meta.data_path(position)) as parquet:
            table = parquet.read()
        begin = int(meta.episodes.data_offset[position])
        streams = [episode_frames(meta, position, camera, threads=0) for camera in meta.cameras]
        for row in range(begin, begin + int(meta.episodes.length[position])):
            record = {name: table.column(name)[row].as_py() for name in table.column_names}
            record |= {
                camera: next(stream).to_ndarray(format="rgb24")
                for camera, stream in zip(meta.cameras, streams, strict=True)
            }
            record["task"] = meta.tasks[record["task_index"]]
            yield make_block(record)


def to_float_chw(cameras: list[str], batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The template's map over its batches."""
    for camera in cameras:
        batch[camera] = np.stack([np.transpose(image, (2, 0, 1)).astype(np.float32) for image in batch[camera]])
    return batch


def make_videos(folder: Path, codec: str, options: FeedBench | ReaderBench) -> str:
    """A dataset as the options describe it; its root."""
    spec = SyntheticSpec(
        episodes=options.episodes,
        frames=options.frames,
        cameras=options.cameras,
        height=options.height,
        width=options.width,
        fps=30,
        episodes_per_file=max(1, options.episodes // 2),
        codec=codec,
        texture=options.texture,
        noise=options.noise,
    )
    make_dataset(folder, spec)
    return str(folder)


def start_ray(num_cpus: int | None, store_bytes: int, *, as_ours: bool) -> None:
    """A quiet local cluster; `as_ours` with the settings of a training run's own."""
    ray.init(
        address="local",
        num_cpus=num_cpus,
        object_store_memory=store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **(init_options() if as_ours else {}),
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
