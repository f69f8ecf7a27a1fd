"""Statistics that disagree with the rows: reported with the share, computed on request, recorded and exported."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from small_run import SmallRun, make_finished, small_config

from vlatune import cli
from vlatune.config.settings import RunConfig
from vlatune.run_setup import make_setup


def rows_of(folder: Path, key: str) -> np.ndarray:
    """All rows of a feature, read without vlatune."""
    files = sorted((folder / "data").glob("*/*.parquet"))
    return np.array([row for file in files for row in pq.read_table(file).column(key).to_pylist()], np.float32)


@pytest.fixture
def narrow(dataset_v3, small_base, tmp_path) -> RunConfig:
    """A run on a dataset whose q01 and q99 lie far inside its rows, as averages over episodes do."""
    root = Path(shutil.copytree(dataset_v3, tmp_path / "narrow"))
    stats = json.loads((root / "meta/stats.json").read_text())
    state = rows_of(root, "observation.state")
    stats["observation.state"]["q01"][0], stats["observation.state"]["q99"][0] = np.quantile(state[:, 0], [0.3, 0.7])
    (root / "meta/stats.json").write_text(json.dumps(stats))
    return small_config(root, small_base, tmp_path / "run")


def test_frames_outside_the_statistics_are_warned_of_by_share_and_dimension(narrow, capsys):
    make_setup(narrow, preflight=True)
    printed = capsys.readouterr().err
    assert re.search(r"observation.state: frames outside q01 and q99, .* dim 0 '\w+': 6\d\.?\d* %;", printed)
    assert "dim 1" not in printed
    assert "--dataset.stats=computed" in printed


def test_inspect_warns_of_them_and_its_command_computes_them(narrow, capsys):
    root = narrow.dataset.root[0]
    assert cli.main(["inspect", root]) == 0
    out = capsys.readouterr().out
    assert "frames outside q01 and q99" in " ".join(out.split())
    assert f"vlatune train --recipe=tiny --dataset.root={root} --dataset.stats=computed" in out


def test_computed_statistics_are_those_of_the_rows_and_are_exported(narrow, tmp_path, capsys):
    config = replace(narrow, dataset=replace(narrow.dataset, stats="computed"))
    make_setup(config, preflight=True)
    assert capsys.readouterr().err == ""
    run_dir = make_finished(config)
    assert cli.main(["export", str(run_dir), str(tmp_path / "policy")]) == 0
    for file in tmp_path.glob("policy/*normalizer_processor.safetensors"):
        stats = load_file(file)
        for key in ("observation.state", "action"):
            expected = np.quantile(rows_of(Path(config.dataset.root[0]), key).astype(np.float64), [0.01, 0.99], axis=0)
            assert np.array_equal([stats[f"{key}.q01"], stats[f"{key}.q99"]], expected.astype(np.float32))
    with pytest.raises(ValueError, match=r"--dataset.stats was 'computed', now 'dataset'"):
        SmallRun(narrow)
    accepted = replace(narrow, allow_changed=("config",))
    with pytest.raises(ValueError, match=r"dataset\.statistics was"):
        SmallRun(accepted)
