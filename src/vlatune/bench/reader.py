"""[ray] `vlatune bench reader`: how near to the decoder does each way of reading a dataset come?

Everything in one run, alternating, on the same files and the same cores: plain PyAV (the limit), ours warm, the
template's way, `ray.data.read_lerobot`, LeRobot's DataLoader. Ours is also measured cold, from a cluster that has just
started to the first row.
"""

import logging
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

import vlatune
from vlatune.bench import reader_peers as peers
from vlatune.bench.decode_limit import decode_rows_per_s
from vlatune.bench.harness import Results, alternate, format_table, last_line
from vlatune.bench.options import ReaderBench
from vlatune.dataset.meta import DatasetMeta, load_meta
from vlatune.dataset.synthetic import SyntheticSpec, make_dataset

LIMIT = "plain PyAV, decode + RGB (the limit)"
DECODE = "plain PyAV, decode only"
OURS = "vlatune.read_lerobot, warm"
TEMPLATE = "the template's way"
RAY = "ray.data.read_lerobot"
LEROBOT = "LeRobotDataset + DataLoader, in order"
LEROBOT_SHUFFLED = "LeRobotDataset + DataLoader, shuffled"


def run(options: ReaderBench) -> None:
    """Print a table and, as the last line, one JSON object."""
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        meta = load_meta(options.root or _make(Path(scratch) / "dataset", options))
        cores = os.cpu_count() or 1
        _start_ray(options)
        try:
            cold = _read_ours(meta)
            results = alternate(_ways(meta, options, cores), options.rounds, say=_say)
            bytes_per_row = _bytes_per_row(meta)
        finally:
            ray.shutdown()
    _print(options, meta, results, cold, bytes_per_row)


def _ways(meta: DatasetMeta, options: ReaderBench, cores: int) -> dict[str, Any]:
    ways = {
        DECODE: lambda: decode_rows_per_s(meta, to_rgb=False, threads=cores),
        LIMIT: lambda: decode_rows_per_s(meta, to_rgb=True, threads=cores),
        OURS: lambda: _read_ours(meta)["rows_per_s"],
    }
    if options.peers:
        most = meta.num_frames // 2
        ways |= {
            TEMPLATE: lambda: peers.template_rows_per_s(meta),
            RAY: lambda: peers.ray_rows_per_s(meta),
            LEROBOT: lambda: peers.lerobot_rows_per_s(meta, shuffle=False, workers=cores, max_rows=most),
            LEROBOT_SHUFFLED: lambda: peers.lerobot_rows_per_s(meta, shuffle=True, workers=cores, max_rows=most),
        }
    return ways


def _read_ours(meta: DatasetMeta) -> dict[str, float]:
    begin = time.perf_counter()
    dataset = vlatune.read_lerobot(meta.root.path)
    rows, first_s, _ = peers.consume(dataset)
    assert rows == meta.num_frames, f"read {rows} rows of {meta.num_frames}"
    return {"rows_per_s": rows / (time.perf_counter() - begin), "first_row_s": first_s}


def _bytes_per_row(meta: DatasetMeta) -> float:
    """Bytes that a row of ours takes in the object store."""
    batch = next(iter(vlatune.read_lerobot(meta.root.path).iter_batches(batch_size=None, batch_format="pyarrow")))
    return batch.nbytes / batch.num_rows  # pyright: ignore[reportAttributeAccessIssue]


def _print(
    options: ReaderBench, meta: DatasetMeta, results: Results, cold: dict[str, float], bytes_per_row: float
) -> None:
    rows = []
    for way in (DECODE, LIMIT, OURS, TEMPLATE, RAY, LEROBOT, LEROBOT_SHUFFLED):
        median, ratio = results.median(way), results.ratio(way, LIMIT)
        if median is not None and ratio is not None:
            rows.append([way, f"{median:.1f}", f"{ratio:.2f}", results.spread(way)])
        elif way in results.not_run:
            rows.append([way, "not run", "", results.not_run[way]])
    rows.append(
        ["vlatune.read_lerobot, cold", f"{cold['rows_per_s']:.1f}", "", f"first row after {cold['first_row_s']:.1f} s"]
    )
    sys.stdout.write(format_table(["way", "rows/s", "of the limit", "spread"], rows) + "\n")
    figures = {
        "ours_warm_over_limit": results.ratio(OURS, LIMIT),
        "ours_over_template": results.ratio(OURS, TEMPLATE),
        "ours_over_ray": results.ratio(OURS, RAY),
        "ours_over_lerobot": results.ratio(OURS, LEROBOT_SHUFFLED),
        "time_to_first_row_s": cold["first_row_s"],
        "bytes_per_row": bytes_per_row,
        "rows_per_s": {way: results.median(way) for way in results.rounds},
        "not_run": results.not_run,
        "rows": meta.num_frames,
    }
    sys.stdout.write(last_line(figures, asdict(options)) + "\n")


def _make(folder: Path, options: ReaderBench) -> str:
    _say(f"making a dataset: {options.episodes} x {options.frames} frames, {options.cameras} cameras, {options.codec}")
    spec = SyntheticSpec(
        episodes=options.episodes,
        frames=options.frames,
        cameras=options.cameras,
        height=options.height,
        width=options.width,
        fps=30,
        episodes_per_file=2,
        codec=options.codec,
    )
    make_dataset(folder, spec)
    return str(folder)


def _start_ray(options: ReaderBench) -> None:
    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        object_store_memory=options.object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _say(text: str) -> None:
    sys.stderr.write(f"vlatune: {text}\n")
    sys.stderr.flush()
