"""[ray] Shared parts of the data benchmarks: datasets, a cluster, plain PyAV, and other readers.

Each reader is called as its users call it. `read_as_template` reimplements the public template's
pipeline: one task per file group, full-size frames as rows of HWC arrays, then a map to CHW
float32.
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
from ray.data._internal.delegating_block_builder import DelegatingBlockBuilder
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from benchmarks.harness import CannotRunError
from benchmarks.options import FeedBench, ReaderBench
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.storage.parquet import opened
from vlatune.train.driver.ray_cluster import environment, ray_environment


def decode_rows_per_s(meta: DatasetMeta, *, to_rgb: bool, threads: int, passes: int = 1) -> float:
    """Return rows (one frame of every camera) per second; a task is an episode of a camera."""
    tasks = [(position, camera) for position in range(len(meta.episodes)) for camera in meta.cameras] * passes
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        frames = sum(pool.map(partial(_decode_episode, meta, to_rgb), tasks))
    rows = frames / len(meta.cameras)
    assert rows == meta.num_frames * passes, f"decoded {rows} rows of {meta.num_frames * passes}"
    return rows / (time.perf_counter() - begin)


def episode_frames(meta: DatasetMeta, position: int, camera: str, *, threads: int) -> Iterator[Any]:
    """Decode an episode of one camera, from a seek to its start."""
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
    """Measurements of one pass over a Ray Dataset."""

    rows: int
    bytes: int
    """Size of all blocks in the object store."""
    first_row_s: float
    seconds: float

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.seconds


def consume(dataset: Any) -> Read:
    """Iterate over a Ray Dataset block by block and discard it."""
    begin, first_s, rows, size = time.perf_counter(), 0.0, 0, 0
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        first_s = first_s or time.perf_counter() - begin
        rows += batch.num_rows
        size += batch.nbytes
    return Read(rows, size, first_s, time.perf_counter() - begin)


def some_episodes(meta: DatasetMeta) -> list[int]:
    """Return two of three episodes, so that every file is read in part."""
    return [position for position in range(len(meta.episodes)) if position % 3 < 2]


def read_as_ray(meta: DatasetMeta, positions: list[int]) -> Read:
    """Read with `ray.data.read_lerobot` and an action window, as documented."""
    require_torchcodec()
    deltas = {"action": [offset / meta.fps for offset in range(ACTION_HORIZON)]}
    episodes = meta.episodes.index[positions].tolist()
    return consume(ray.data.read_lerobot(meta.root.path, episodes=episodes, delta_timestamps=deltas))


def lerobot_rows_per_s(meta: DatasetMeta, *, shuffle: bool, workers: int, max_rows: int) -> float:
    """Measure `LeRobotDataset` with a torch DataLoader, as in `lerobot-train`."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from torch.utils.data import DataLoader, Subset

    require_torchcodec()
    deltas = {"action": [offset / meta.fps for offset in range(ACTION_HORIZON)]}
    dataset = LeRobotDataset("bench/reader", root=meta.root.path, delta_timestamps=deltas, video_backend="torchcodec")
    order = np.random.default_rng(0).permutation(len(dataset)) if shuffle else np.arange(len(dataset))
    subset = Subset(dataset, order[:max_rows].tolist())
    loader = DataLoader(subset, batch_size=8, num_workers=workers, prefetch_factor=2, multiprocessing_context="spawn")
    batches = iter(loader)
    next(batches)  # excludes the start of the workers
    begin = time.perf_counter()
    rows = sum(len(batch["index"]) for batch in batches)
    return rows / (time.perf_counter() - begin)


def read_as_template(meta: DatasetMeta, positions: list[int]) -> Read:
    to_float: Any = partial(to_float_chw, list(meta.cameras))
    read = ray.data.read_datasource(TemplateSource(meta, positions))
    return consume(read.map_batches(to_float, batch_size=8, batch_format="numpy"))


class TemplateSource(Datasource):
    """One read task per group of files, one row at a time.

    `hoisted` converts parquet columns once per table, as pull request #705 does, not once per row.
    """

    def __init__(self, meta: DatasetMeta, positions: list[int], *, hoisted: bool = False) -> None:
        super().__init__()
        self._meta, self._positions, self._hoisted = meta, positions, hoisted

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
        meta, hoisted = self._meta, self._hoisted
        rows = int(meta.episodes.length[positions].sum())
        return ReadTask(lambda: _template_rows(meta, positions, hoisted), BlockMetadata(rows, None, None, None))


def _template_rows(meta: DatasetMeta, positions: list[int], hoisted: bool) -> Iterable[Any]:
    """Yield one table per row, with full-size frames of every camera."""
    path, columns = "", {}
    for position in positions:
        if path != meta.data_path(position):
            path = meta.data_path(position)
            with opened(meta.root, path) as parquet:
                names = [name for name in parquet.schema_arrow.names if name not in parquet.text_columns]
                table = parquet.read(names)
            columns = {name: table.column(name).to_pylist() if hoisted else table.column(name) for name in names}
        begin = int(meta.episodes.data_offset[position])
        streams = [episode_frames(meta, position, camera, threads=0) for camera in meta.cameras]
        for row in range(begin, begin + int(meta.episodes.length[position])):
            record = {name: values[row] if hoisted else values[row].as_py() for name, values in columns.items()}
            record |= {
                camera: next(stream).to_ndarray(format="rgb24")
                for camera, stream in zip(meta.cameras, streams, strict=True)
            }
            record["task"] = meta.tasks[record["task_index"]]
            builder = DelegatingBlockBuilder()
            builder.add(record)
            yield builder.build()


def to_float_chw(cameras: list[str], batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for camera in cameras:
        batch[camera] = np.stack([np.transpose(image, (2, 0, 1)).astype(np.float32) for image in batch[camera]])
    return batch


def to_float_chw_fused(cameras: list[str], batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write all images of a camera into one float32 buffer, as pull request #705 does."""
    for camera in cameras:
        images = batch[camera]
        height, width, channels = images[0].shape
        out_NCHW = np.empty((len(images), channels, height, width), np.float32)
        for row, image in enumerate(images):
            out_NCHW[row] = image.transpose(2, 0, 1)
        batch[camera] = out_NCHW
    return batch


def make_videos(folder: Path, codec: str, options: FeedBench | ReaderBench) -> str:
    """Create a dataset from the options and return its root."""
    spec = SyntheticSpec(
        episodes=options.episodes,
        frames=options.frames,
        cameras=options.cameras,
        height=options.height,
        width=options.width,
        fps=30,
        episodes_per_file=max(1, options.episodes // 2),
        codec=codec,
        noise=options.noise,
    )
    make_dataset(folder, spec)
    return str(folder)


def start_ray(num_cpus: int | None, store_bytes: int, *, as_ours: bool) -> None:
    """Start a local cluster without log output; `as_ours` uses the settings of a training run."""
    with environment(ray_environment() if as_ours else {}):
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
