"""[ray] What one read task needs, measured in a process of its own: memory over the interpreter's, cost per row, and the
share of it that goes into checks of what is read.

Run as `python -m vlatune.bench.reader.read_task_cost ROOT`; prints one JSON object. The task's own code runs here without a
cluster around it, so that nothing else is in the figure.
"""

import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import psutil

from vlatune.dataset.reader import read_into
from vlatune.dataset.storage.parquet import open_parquet
from vlatune.dataset.storage.root import Root
from vlatune.dataset.video.decoder import close_decoders
from vlatune.dataset.video.recorded import open_container
from vlatune.pipeline.read_lerobot import read_task
from vlatune.pipeline.read_plan import ReadPlan, plan_read

CHECKS: tuple[tuple[Callable[..., Any] | type, str], ...] = (
    (read_into, "check_rows"),  # rows are the episode's, of the declared form, and finite
    (open_container, "check_mp4"),  # an mp4 file's header
    (close_decoders, "video_stream"),  # its codec, size and rate
    (close_decoders, "check_size"),  # every picture's
    (open_parquet, "check_columns"),
    (open_parquet, "check_plain"),
    (open_parquet, "columns_of"),  # which pages will be met
    (open_parquet, "check_pages"),
    (Root, "real_path"),  # no link out, a regular file
    (Root, "open_file"),  # the same; all of opening is counted, as nothing else is in it
)
"""(something of a module, a check in that module)"""
ROUNDS = 5


def measure_reading(root: str) -> dict[str, float]:
    """`task_bytes`: peak over the interpreter with its imports; `tenfold_cost`: time of ten times the episodes over ten times the
    time; `checks_share`: CPU time that the checks add to reading, as a share of the rest of it."""
    command = [sys.executable, "-m", "vlatune.bench.reader.read_task_cost", root]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(root: str) -> None:
    plan = plan_read(root, partitioning="sequential")
    share = checks_share(plan)  # before anything is read here: each pass begins with empty caches
    few = plan_read(root, partitioning="sequential", episodes=[int(plan.tasks[0].meta.episodes.index[0])])
    before = psutil.Process().memory_info().rss
    _seconds(few)  # page cache and code paths warm; also the first use of memory
    tenth = min(_seconds_per_row(few) for _ in range(3))
    whole = _seconds_per_row(plan)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(
        json.dumps(
            {
                "task_bytes": peak - before,
                "tenfold_cost": whole / tenth,
                "checks_share": share,
                "rows": plan.rows,
                "few_rows": few.rows,
            }
        )
        + "\n"
    )


def checks_share(plan: ReadPlan) -> float:
    """The median over passes, each in a forked child with empty caches, of the CPU time that is spent in checks."""
    return statistics.median(_in_child(plan) for _ in range(ROUNDS))


def _share_of_pass(plan: ReadPlan) -> float:
    begin = time.process_time()
    with timed_checks() as spent_s:
        _seconds(plan)
    whole_s = time.process_time() - begin
    return sum(spent_s) / (whole_s - sum(spent_s))


@contextmanager
def timed_checks() -> Iterator[list[float]]:
    """Every call of a check adds the CPU time that it took; two passes, one without checks, differ by more than they cost."""
    spent_s: list[float] = []
    places = [(sys.modules[owner.__module__], name) for owner, name in CHECKS]
    kept = [getattr(module, name) for module, name in places]
    for (module, name), check in zip(places, kept, strict=True):
        setattr(module, name, _timed(check, spent_s))
    try:
        yield spent_s
    finally:
        for (module, name), check in zip(places, kept, strict=True):
            setattr(module, name, check)


def _timed(check: Callable[..., Any], spent_s: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        begin = time.thread_time()
        try:
            return check(*arguments, **options)
        finally:
            spent_s.append(time.thread_time() - begin)

    return call


def _in_child(plan: ReadPlan) -> float:
    context = multiprocessing.get_context("fork")  # with the imports of this process, and none of its caches
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(there, plan))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise RuntimeError("a pass of reading broke off; see above") from None
    finally:
        child.join()


def _answer(there: Connection, plan: ReadPlan) -> None:
    there.send(_share_of_pass(plan))


def _seconds_per_row(plan: ReadPlan) -> float:
    return _seconds(plan) / plan.rows


def _seconds(plan: ReadPlan) -> float:
    close_decoders()
    begin = time.perf_counter()
    for task in plan.tasks:
        for _ in read_task(task.delivery, task.places, task.spans, plan.block_rows):
            pass
    return time.perf_counter() - begin


if __name__ == "__main__":
    main(sys.argv[1])
