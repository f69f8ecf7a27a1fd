"""`python -m benchmarks cost`: compare the estimate of `vlatune doctor` with measured steps on this CPU.

The device "this CPU" has measured figures: products of large matrices, traffic of a sum and a GELU
over large vectors, and the overhead of an operator in a stack of tiny layers. All of it runs on one
thread and counts its CPU time, so that other processes disturb it little.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.base_models import make_base, make_rows
from benchmarks.harness import format_table, print_last
from benchmarks.options import CostBench, PolicyBench, StepBench
from benchmarks.step.step_ways import OurWay
from vlatune.checks.run_cost import Device, StepWork, count_kernels, on_meta, step_s
from vlatune.policies.base import ModuleOptions, PolicyOutput
from vlatune.train.worker.device import set_performance_flags
from vlatune.train.worker.transfer import collate

SIDE, LENGTH, TINY = 1024, 2**24, 8
"""Sides of matrices, elements of vectors, and width of tiny layers that are timed."""
DEMO = {"width": 64, "depth": 2, "vision_depth": 2, "cameras": 1, "image_size": 64, "tokens": 48, "horizon": 8}
WIDE = {"width": 512, "depth": 4, "vision_depth": 4, "cameras": 2}
CASES: Mapping[str, tuple[str, str, int, Mapping[str, int]]] = {
    "PI0.5, demo size, expert": ("pi05", "expert", 4, DEMO),
    "PI0.5, width 512, expert": ("pi05", "expert", 2, WIDE),
    "PI0.5, width 512, lora": ("pi05", "lora", 2, WIDE),
    "SmolVLA, width 192, full": ("smolvla", "full", 4, WIDE | {"width": 192, "image_size": 256}),
    "ACT, width 256": ("act", "full", 2, {"width": 256, "cameras": 2, "image_size": 128}),
}
"""Policy, fine-tuning mode, batch size and size of each configuration."""


class TinyLayers(nn.Module):
    """Layers so small that their operators cost nothing but their overhead."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(TINY), nn.Linear(TINY, TINY), nn.GELU()) for _ in range(50))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, batch: Mapping[str, Tensor]) -> PolicyOutput:
        x = batch["x"]
        for block in self.blocks:
            x = x + block(x)
        return PolicyOutput(x.sum())


def run(options: CostBench) -> None:
    """Print a table and a final JSON line."""
    set_performance_flags(torch.device("cpu"), 1)
    found = {name: _compare(*case, rounds=options.rounds) for name, case in CASES.items()}
    rows = [
        [name, f"{1000 * measured:.1f}", f"{1000 * estimated:.1f}", f"{estimated / measured:.2f}"]
        for name, (measured, estimated) in found.items()
    ]
    sys.stdout.write(
        format_table(("configuration", "measured ms", "estimated ms", "estimated / measured"), rows) + "\n"
    )
    steps = {
        name: {"measured_s": measured, "estimated_s": estimated, "ratio": estimated / measured}
        for name, (measured, estimated) in found.items()
    }
    worst = max(abs(one["ratio"] - 1) for one in steps.values())
    print_last("cost", {"worst_error": worst, "steps": steps}, options)


def measure_cpu(rounds: int) -> Device:
    matrix, vector, tiny, batch = (
        torch.randn(SIDE, SIDE),
        torch.randn(LENGTH),
        TinyLayers(),
        {"x": torch.randn(4, TINY)},
    )
    product_s = _median_s(lambda: matrix @ matrix, rounds)
    traffic_s = _median_s(lambda: (vector + vector, nn.functional.gelu(vector, approximate="tanh")), rounds)

    def step() -> None:
        tiny(batch).loss.backward()
        tiny.zero_grad()

    overhead_s = _median_s(step, 4 * rounds) / len(count_kernels(on_meta(tiny), batch, len(batch["x"])))
    flops, traffic = 2 * SIDE**3 / product_s, vector.nbytes * (3 + 2) / traffic_s
    return Device("this CPU", flops, flops, traffic, 0, 1, 0, 1.0, 1.0, overhead_s, 0.0, is_asynchronous=False)


def _compare(policy: str, train: str, batch_size: int, size: Mapping[str, Any], *, rounds: int) -> tuple[float, float]:
    """Return the measured and the estimated seconds of an optimizer step."""
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        base = make_base(Path(scratch) / "base", StepBench(policy=PolicyBench(policy), **size))
        options = ModuleOptions(train, "float32")
        module = base.adapter.load_module(base.spec, base.binding, options, stats=base.stats()).train()
    columns = base.columns(make_rows(base, batch_size, 0))
    kernels = count_kernels(on_meta(module), collate(columns).to_tensors().tensors, batch_size)
    trained = [one.numel() for one in module.parameters() if one.requires_grad]
    work = StepWork(kernels, 1, sum(trained), tensors=len(trained))
    program = OurWay(module, base, columns, torch.device("cpu"))
    before, measured_s, after = measure_cpu(rounds), _median_s(program.step, rounds), measure_cpu(rounds)
    program.close()
    return measured_s, (step_s(work, before) + step_s(work, after)) / 2  # a shared machine changes its speed


def _median_s(call: Callable[[], object], rounds: int) -> float:
    """Return the CPU seconds of a call, after two that warm up."""
    taken = []
    for _ in range(rounds + 2):
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return statistics.median(taken[2:])
