"""[ray] Run consumers of several speeds on one cluster of the feed benchmark.

Run as `python -m benchmarks.feed.feed_consumers JSON`; prints one JSON object per consumer. A
consumer sleeps a fixed time per batch, like a host that waits for an accelerator.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import ray

import vlatune
from benchmarks import peer_readers as peers
from benchmarks.peer_readers import start_ray
from vlatune.batch import ACTION, STATE, TASK, Columns
from vlatune.bounded_queue import ReadAhead
from vlatune.data.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.data.order.partition import select_episodes
from vlatune.data.order.sample_order import OrderSpec, choose_lanes
from vlatune.data.reader import CameraSpec, ReadSpec, VectorSpec
from vlatune.feed.feed import Feed, queued_batches
from vlatune.feed.memory import SpillMeter, plan_budget, read_counters
from vlatune.feed.plan import DataPlan, Share

MORE_STEPS = 200
"""Steps planned beyond the consumer's last: the same number of rows is in flight at both ends of a
measurement, so that prefetched rows do not count as speed."""
WARM_UP_BATCHES = 10
"""Batches excluded from the wait share, while the pipeline fills."""


@dataclass(frozen=True)
class Job:
    """Arguments of one cluster."""

    program: str
    """One of reader, ours, template."""
    root: str
    store_bytes: int
    num_cpus: int
    batch_size: int
    consumers: list[dict[str, Any]]
    """Dicts of name, step_s (seconds per batch), batches, num_workers."""


@dataclass
class Consumed:
    samples: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    """Data wait after the warm-up."""
    busy_s: float = 0.0
    """Total time after the warm-up."""
    steady_samples: int = 0
    """Samples after the warm-up."""
    first_batch_s: float = 0.0


def main(job: Job) -> None:
    start_ray(job.num_cpus, job.store_bytes, as_ours=job.program == "ours")
    try:
        for consumer in job.consumers:
            _wait_until_empty()
            seen = _read(job) if job.program == "reader" else _run(job, consumer)
            sys.stdout.write(json.dumps(seen) + "\n")
            sys.stdout.flush()
    finally:
        ray.shutdown()


def _run(job: Job, consumer: dict[str, Any]) -> dict[str, Any]:
    step_s = consumer["step_s"]
    meter = SpillMeter(read_counters)
    run = _consume_ours if job.program == "ours" else _consume_template
    parts, extra = run(job, consumer, step_s)
    store = meter.close()
    busy_s = sum(one.busy_s for one in parts)
    return {
        **extra,
        "step_s": step_s,
        "samples_per_s": sum(
            one.steady_samples / one.busy_s if one.busy_s else one.samples / one.seconds for one in parts
        ),
        "wait_share": max((one.waited_s / one.busy_s for one in parts if one.busy_s), default=0.0) if busy_s else None,
        "first_batch_s": max(one.first_batch_s for one in parts),
        "spilled_bytes": store.spilled_bytes,
        "fallback_bytes": store.fallback_bytes,
        "peak_store_share": meter.peak_bytes / job.store_bytes,
    }


def consume(batches: Iterable[Any], step_s: float, most: int) -> Consumed:
    """Take at most `most` batches, each for `step_s` seconds."""
    done = Consumed()
    begin = time.perf_counter()
    stream = iter(batches)
    for number in range(most):
        asked = time.perf_counter()
        batch = next(stream, None)
        if batch is None:
            break
        waited_s = time.perf_counter() - asked
        time.sleep(step_s)
        done.samples += len(batch["index"])
        done.first_batch_s = done.first_batch_s or waited_s
        if number >= WARM_UP_BATCHES:
            done.waited_s += waited_s
            done.busy_s += time.perf_counter() - asked
            done.steady_samples += len(batch["index"])
    done.seconds = time.perf_counter() - begin
    return done


def _consume_ours(job: Job, consumer: dict[str, Any], step_s: float) -> tuple[list[Consumed], dict[str, Any]]:
    """Run one feed and thread per worker as in training, but in one process."""
    workers, batches = int(consumer.get("num_workers", 1)), int(consumer["batches"])
    plan = make_plan(job, workers)
    budget = plan_budget(
        store_bytes=job.store_bytes,
        row_bytes=plan.row_bytes(),
        num_workers=workers,
        num_cpus=job.num_cpus,
    )
    feeds = [
        Feed(plan, Share(rank, workers), budget, first_step=0, last_step=batches + MORE_STEPS)
        for rank in range(workers)
    ]
    depth = queued_batches(plan.batch_size * budget.row_bytes)
    ahead = [ReadAhead(feed, depth=depth, name="feed") for feed in feeds]
    done: list[Consumed] = [Consumed()] * workers

    def work(rank: int) -> None:
        done[rank] = consume(ahead[rank], step_s, batches)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for feed, one in zip(feeds, ahead, strict=True):
        feed.close()
        one.close()
    taken = sum(one.samples for one in done)
    copied = sum(feed.times.copied_bytes for feed in feeds) / taken / plan.row_bytes()
    return done, {
        "num_workers": workers,
        "bytes_per_sample": plan.row_bytes(),
        "host_copies_per_sample": 1 + copied,  # into the store, out of it, into the batch
        "budget": budget.reason(job.store_bytes, workers),
    }


def _consume_template(job: Job, consumer: dict[str, Any], step_s: float) -> tuple[list[Consumed], dict[str, Any]]:
    """Pass full-size float32 frames through the store, batched by `iter_batches`."""
    meta = load_meta(job.root)
    to_float: Any = partial(peers.to_float_chw, list(meta.cameras))
    positions = list(range(len(meta.episodes)))
    dataset = ray.data.read_datasource(peers.TemplateSource(meta, positions)).map_batches(
        to_float, batch_size=job.batch_size, batch_format="numpy"
    )
    sizes: list[float] = []

    def batches() -> Iterator[Columns]:
        for batch in dataset.iter_batches(batch_size=job.batch_size, batch_format="numpy"):
            sizes.append(sum(values.nbytes for values in batch.values()) / len(batch["index"]))  # type: ignore[index, union-attr]
            yield batch  # pyright: ignore[reportReturnType]

    done = consume(batches(), step_s, int(consumer["batches"]))
    return [done], {"num_workers": 1, "bytes_per_sample": sum(sizes) / len(sizes)}


def read_spec(meta: DatasetMeta) -> ReadSpec:
    """Return what PI0.5 reads: all cameras at 224 x 224, state and 50 actions."""
    return ReadSpec(
        root=meta.root,
        dataset_index=0,
        tolerance_s=1e-4,
        cameras=tuple(CameraSpec(name, "video", 224, 224) for name in meta.cameras),
        vectors=(
            VectorSpec(STATE, "float32", meta.features[STATE].shape),
            VectorSpec(ACTION, "float32", meta.features[ACTION].shape, tuple(range(50))),
        ),
        tasks=meta.tasks,
    )


def make_plan(job: Job, num_workers: int) -> DataPlan:
    meta = load_meta(job.root)
    selection = select_episodes((meta,), None)
    global_batch = job.batch_size * num_workers
    order = OrderSpec(
        lengths=tuple(selection.length.tolist()),
        seed=0,
        global_batch=global_batch,
        lanes=choose_lanes(global_batch, num_workers),
        run_length=32,
        window_rows=32,
    )
    return DataPlan((meta,), selection, (read_spec(meta),), order, (drop_task,), job.batch_size)


def drop_task(columns: Columns) -> Columns:
    """Drop the task strings; in training, tokens replace them."""
    return {name: values for name, values in columns.items() if name != TASK}


def _read(job: Job) -> dict[str, Any]:
    """Measure `vlatune.read_lerobot` on the same files, warm."""
    peers.consume(vlatune.read_lerobot(job.root))  # excludes the start of the readers
    return {"samples_per_s": peers.consume(vlatune.read_lerobot([job.root] * 4)).rows_per_s}


def _wait_until_empty(at_most_s: float = 20.0) -> None:
    """Wait until the previous run's objects are freed, so that they do not count as a peak."""
    end = time.monotonic() + at_most_s
    while read_counters().used_bytes > 1_000_000 and time.monotonic() < end:
        time.sleep(0.2)


def job_json(job: Job) -> str:
    return json.dumps(asdict(job))


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main(Job(**json.loads(sys.argv[1])))
