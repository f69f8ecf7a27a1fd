"""`vlatune doctor --json` lists what a run would store instead of computing it again."""

import json
from pathlib import Path

import pytest

from vlatune import cli


def test_doctor_lists_the_levels_with_their_sizes_and_times(
    dataset_v3: Path, small_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["doctor", f"--dataset.root={dataset_v3}", f"--policy.path={small_base}", "--batch_size=4", "--steps=100"]
    words += [f"--output_dir={tmp_path / 'run'}", f"--dataset.cache={tmp_path / 'frames'}", "--json"]
    cli.main(words)
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    (found,) = (one for one in answer["findings"] if one["check"] == "cache")
    assert found["level"] == "pass"
    (frames,) = (one for one in found["figures"]["levels"] if one["name"] == "frames")
    assert frames["is_used"]
    assert frames["share"] == 1
    assert frames["stored_bytes"] % frames["sample_bytes"] == 0
    assert 0 < frames["epoch_s_with"] < frames["epoch_s_without"]
    assert not (tmp_path / "frames").exists()
