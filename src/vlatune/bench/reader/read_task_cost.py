"""[ray] What one read task needs, measured in a process of its own: memory over the interpreter's, and cost per row.

Run as `python -m vlatune.bench.reader.read_task_cost ROOT`; prints one JSON object. The task's own code runs here without a
cluster around it, so that nothing else is in the figure.
"""

import json
import resource
import subprocess
import sys
import time

import psutil

from vlatune.dataset.video.decoder import close_decoders
from vlatune.pipeline.read_lerobot import read_task
from vlatune.pipeline.read_plan import ReadPlan, plan_read


def measure_reading(root: str) -> dict[str, float]:
    """`task_bytes`: peak over the interpreter with its imports; `tenfold_cost`: time of ten times the episodes over ten times the time."""
    command = [sys.executable, "-m", "vlatune.bench.reader.read_task_cost", root]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(root: str) -> None:
    plan = plan_read(root, partitioning="sequential")
    few = plan_read(root, partitioning="sequential", episodes=[int(plan.tasks[0].meta.episodes.index[0])])
    before = psutil.Process().memory_info().rss
    _seconds(few)  # page cache and code paths warm; also the first use of memory
    tenth = min(_seconds_per_row(few) for _ in range(3))
    whole = _seconds_per_row(plan)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(
        json.dumps(
            {"task_bytes": peak - before, "tenfold_cost": whole / tenth, "rows": plan.rows, "few_rows": few.rows}
        )
        + "\n"
    )


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
