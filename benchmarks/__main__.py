"""Run a benchmark: `make bench NAME=reader ARGS=--rounds=1` or `python -m benchmarks reader`."""

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.options import (
    CostBench,
    FeedBench,
    PlanBench,
    ReaderBench,
    ResumeBench,
    StepBench,
    TableBench,
    TrainBench,
)
from vlatune.cli import Command, Program, main


def run_benchmark(name: str, options: Any) -> None:
    import_module(f"benchmarks.{name}.{name}_bench").run(options)


COMMANDS = {
    name: Command(description, flags=lambda own=options: own, call=partial(run_benchmark, name))
    for name, options, description in (
        ("reader", ReaderBench, "reading a dataset, compared with the decoder's limit and with other readers"),
        ("feed", FeedBench, "feeding a consumer: rate, waiting time and spilled bytes"),
        ("step", StepBench, "time and host syncs of a training step, compared with LeRobot's"),
        ("cost", CostBench, "doctor's estimate of a step, compared with measured steps on this CPU"),
        ("plan", PlanBench, "time and memory to plan a run with up to 10^9 frames and 512 workers"),
        ("resume", ResumeBench, "cost of a checkpoint and of a killed process"),
        ("train", TrainBench, "training end to end, compared with `lerobot-train`"),
        ("table", TableBench, "the template, pull request #705, `lerobot-train` and vlatune in one table"),
    )
}

BENCHMARKS = Program("python -m benchmarks", COMMANDS, Path(__file__).parent)

if __name__ == "__main__":
    sys.exit(main(program=BENCHMARKS))
