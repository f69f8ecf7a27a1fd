"""[ray] What the benchmarks of data run on: a dataset of video that costs what a recording's does, and a cluster."""

import logging
from pathlib import Path

import ray

from vlatune.bench.options import FeedBench, ReaderBench
from vlatune.dataset.synthetic import SyntheticSpec, make_dataset
from vlatune.pipeline.memory import FREE_SOON


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
        _system_config=FREE_SOON if as_ours else None,
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
