"""The table benchmark at a tiny size: every program trains, and all figures are there."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.table.table_bench import LEROBOT, OURS, PROGRAMS
from benchmarks.table.template_step import TEMPLATE, TEMPLATE_705
from vlatune.cli import main

STEPS = 4


@pytest.mark.slow
def test_every_program_has_a_row_with_all_figures(dataset_v3: Path, small_base: Path, tmp_path: Path, capsys):
    output = tmp_path / "table.json"
    flags = [f"--root={dataset_v3}", f"--base={small_base}", f"--folder={tmp_path / 'work'}", f"--steps={STEPS}"]
    flags += ["--batch_size=4", "--store_bytes=100000000", "--eval_split=0.2", "--eval_samples=4"]
    assert main(["table", f"--output={output}", "--loader_workers=0", *flags], BENCHMARKS) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(output.read_text()) == last
    rows = last["rows"]
    assert list(rows) == list(PROGRAMS)
    for name, row in rows.items():
        assert row["step_s"] == pytest.approx(row["producer_s"] / STEPS)
        assert row["first_step_s"] > 0 < row["held_out_error"]
        assert (row["spilled_bytes"] is None) == (name == LEROBOT)
    assert (
        len({row["held_out_error"] for row in rows.values()} | {last["base_held_out_error"]}) == 5
    )  # all have trained
    assert rows[TEMPLATE]["host_syncs"] > rows[TEMPLATE_705]["host_syncs"] > rows[OURS]["host_syncs"] == 0
    assert rows[OURS]["checkpoint_bytes"] < rows[TEMPLATE]["checkpoint_bytes"]
    assert rows[OURS]["spilled_bytes"] == 0
