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
from pathlib import Path
from typing import Any

import psutil

from vlatune.dataset.parquet import open_parquet
from vlatune.dataset.reader import read_into
from vlatune.dataset.recorded import open_container
from vlatune.dataset.storage import Root
from vlatune.dataset.video import close_decoders
from vlatune.pipeline.read_lerobot import read_task
from vlatune.pipeline.read_plan import ReadPlan, plan_read

CHECKS: tuple[tuple[Callable[..., Any] | type, str, Any], ...] = (
    (read_into, "check_rows", None),  # rows are the episode's, of the declared form, and finite
    (open_container, "check_mp4", None),  # an mp4 file's header
    (open_parquet, "check_columns", None),
    (open_parquet, "check_plain", None),
    (open_parquet, "check_pages", None),
    (Root, "real_path", lambda folder, name: Path(folder) / name),  # no link out, a regular file
)
"""(something of a module, a check in that module, what stands in for it; None for nothing)"""
ROUNDS = 5


def measure_reading(root: str) -> dict[str, float]:
    """`task_bytes`: peak over the interpreter with its imports; `tenfold_cost`: time of ten times the episodes over ten times the
    time; `checks_share`: CPU time that the checks add to reading, as a share of it without them."""
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
    """The median over rounds of a pass with the checks and one without, taking turns, each in a forked child."""
    shares = []
    for number in range(ROUNDS):
        order = (True, False) if number % 2 else (False, True)
        cost = {checked: _in_child(plan, checked=checked) for checked in order}
        shares.append(cost[True] / cost[False] - 1)
    return statistics.median(shares)


def _cpu_seconds(plan: ReadPlan, *, checked: bool) -> float:
    begin = time.process_time()
    if checked:
        _seconds(plan)
    else:
        with without_checks():
            _seconds(plan)
    return time.process_time() - begin


@contextmanager
def without_checks() -> Iterator[None]:
    """Reading as it would be if every file were to be trusted; for measuring alone."""
    places = [(sys.modules[owner.__module__], name, other) for owner, name, other in CHECKS]
    kept = [getattr(module, name) for module, name, _ in places]
    for module, name, other in places:
        setattr(module, name, other or (lambda *_, **__: None))
    try:
        yield
    finally:
        for (module, name, _), check in zip(places, kept, strict=True):
            setattr(module, name, check)


def _in_child(plan: ReadPlan, *, checked: bool) -> float:
    context = multiprocessing.get_context("fork")  # with the imports of this process, and none of its caches
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(there, plan, checked))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        raise RuntimeError("a pass of reading broke off; see above") from None
    finally:
        child.join()


def _answer(there: Connection, plan: ReadPlan, checked: bool) -> None:
    there.send(_cpu_seconds(plan, checked=checked))


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
