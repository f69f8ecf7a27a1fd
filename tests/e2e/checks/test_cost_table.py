"""`vlatune doctor` estimates time and price of a run on named GPUs."""

import json
from pathlib import Path

import pytest

from vlatune import cli


def test_doctor_prices_the_run_on_each_gpu(
    dataset_v3: Path, small_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["doctor", f"--dataset.root={dataset_v3}", f"--policy.path={small_base}", "--batch_size=4", "--steps=7200"]
    words += [f"--output_dir={tmp_path / 'run'}", "--dataset.cache=off", f"--html={tmp_path / 'page.html'}"]
    cli.main([*words, "--usd_per_hour=2.5", "--num_workers=2", "--json"])
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    (found,) = (one for one in answer["findings"] if one["check"] == "cost")
    assert found["level"] == "pass"
    for one in found["figures"]["devices"]:
        assert one["hours"] == pytest.approx(2 * one["step_s"])
        assert one["samples_per_s"] == pytest.approx(8 / one["step_s"])
        assert one["usd"] == pytest.approx(2 * 2.5 * one["hours"])
        assert one["fits"]
        assert one["bound"] == "launches"  # a tiny model
    page = (tmp_path / "page.html").read_text()
    rows = [line for line in found["figures"]["table"] if " ms " in line]
    assert [row.split("  ")[0] for row in rows] == ["L4", "A10G", "A100 80GB", "H100", "RTX 4090"]
    assert all(row in page for row in rows)
