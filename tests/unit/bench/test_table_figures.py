"""Figures, table and plot of the table benchmark, from given measurements."""

import json
from pathlib import Path

import pytest

from benchmarks.options import TableBench
from benchmarks.table.table_bench import (
    COLUMNS,
    LEROBOT,
    OURS,
    PROGRAMS,
    Row,
    make_program,
    print_report,
)
from benchmarks.table.template_program import TemplateJob
from benchmarks.table.template_step import TEMPLATE, TEMPLATE_705
from benchmarks.tables import COLUMNS as PAGE_COLUMNS
from benchmarks.train.train_cases import TrainJob
from vlatune.config.settings import DatasetConfig, PolicyConfig, RayConfig, RunConfig


def make_row(step_s: float, spilled_bytes: int | None = 0) -> Row:
    return Row(step_s, 50 * step_s, 10**8, spilled_bytes, 16 / step_s, 3, 12.0, 10**7, 0.25)


ROWS = {
    TEMPLATE: make_row(2.0, 3 * 10**9),
    TEMPLATE_705: make_row(1.0, 10**9),
    LEROBOT: make_row(0.8, None),
    OURS: make_row(0.25),
}


def test_ratios_are_of_the_time_of_a_step_and_files_lie_beside_the_result(tmp_path: Path, capsys):
    output = tmp_path / "table.json"
    print_report(TableBench(output=str(output)), ROWS, 0.5)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.keys() >= {"commit", "versions", "hardware", "settings"} | {key for key, _ in PAGE_COLUMNS["table"][1]}
    assert (last["template_over_ours"], last["template_705_over_ours"], last["lerobot_over_ours"]) == (8.0, 4.0, 3.2)
    assert (last["template_spilled_bytes"], last["spilled_bytes"]) == (3 * 10**9, 0)
    lines = output.with_suffix(".md").read_text().splitlines()
    assert len(lines) == 2 + len(PROGRAMS)
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 2}


@pytest.mark.parametrize("num_workers", [1, 4])
def test_all_programs_get_the_same_run(num_workers: int, tmp_path: Path):
    config = RunConfig(
        dataset=DatasetConfig(root=("data",)),
        policy=PolicyConfig(path="base", type="pi05", train="full"),
        ray=RayConfig(object_store_bytes=10**8),
        num_workers=num_workers,
        steps=30,
        batch_size=2,
    )
    job = TrainJob(config, (0, 2), num_workers=3, device="cuda")
    for version in (TEMPLATE, TEMPLATE_705):
        given = TemplateJob(**json.loads(make_program(version, job, tmp_path).command[-1]))
        assert (given.version, given.steps, given.batch_size, given.episodes) == (version, 30, 2, [0, 2])
        assert (given.num_workers, given.device, given.store_bytes) == (num_workers, "cuda", 10**8)
    words = make_program(LEROBOT, job, tmp_path).command
    assert {"--steps=30", "--batch_size=2", "--policy.device=cuda", "--num_workers=3"} <= set(words)
    assert ("--num_processes=4" in words) == (num_workers == 4)
