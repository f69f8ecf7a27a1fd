"""The benchmark commands at a small size, and `lerobot-train` as the train benchmark calls it."""

import json
import logging
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.options import PolicyBench, TrainBench
from benchmarks.train import lerobot_main
from benchmarks.train import train_programs as programs
from benchmarks.train.time_to_quality import ErrorMeter, lerobot_folder
from benchmarks.train.train_bench import CACHED, OURS
from benchmarks.train.train_cases import make_job
from vlatune.cli import main
from vlatune.registry import PACKAGES

STEPS = 2


@pytest.fixture(autouse=True)
def _restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what `lerobot-train` changes in this process: arguments, root logger, environment."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    root, environment = logging.getLogger(), dict(os.environ)
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]


@pytest.mark.slow
@pytest.mark.parametrize("policy", PACKAGES)
def test_lerobot_train_runs_with_every_policy(policy, dataset_v3: Path, tmp_path, capfd):
    options = TrainBench(
        policy=PolicyBench(policy),
        config="video",
        root=str(dataset_v3),
        steps=STEPS,
        batch_size=2,
        eval_split=0.2,
        num_workers=0,
    )
    job = make_job(options, tmp_path)
    (tmp_path / "lerobot").mkdir()
    program = programs.lerobot(job, tmp_path / "lerobot")
    _, *start, base = program.command[:5]
    flags = program.command[5:]
    assert start == ["-P", "-m", lerobot_main.__name__]
    lerobot_main.main(base, flags)
    lines = "".join(capfd.readouterr()).encode().splitlines()
    assert sum(map(program.is_mark, lines)) == STEPS // job.config.log_freq
    meter = ErrorMeter(job, max_samples=2)
    before, after = meter.error_of(Path(base)), meter.error_of(lerobot_folder(job, tmp_path / "lerobot", STEPS))
    assert 0 < after != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "train",
            [
                "--rounds=1",
                "--steps=2",
                "--batch_size=2",
                "--store_bytes=90000000",
                "--eval_split=0.2",
                "--alone_s=0.05",
                "--peers=[]",
            ],
        ),
        (
            "feed",
            [
                "--rounds=1",
                "--episodes=4",
                "--frames=40",
                "--height=96",
                "--width=128",
                "--rows=80",
                "--step_s=0.2",
                "--peers=false",
            ],
        ),
        (
            "reader",
            [
                "--rounds=1",
                "--episodes=4",
                "--frames=20",
                "--height=96",
                "--width=128",
                "--codec=h264",
                "--passes=1",
                "--peers=false",
            ],
        ),
        ("resume", ["--interval=10", "--steps=200"]),
    ],
)
def test_a_benchmark_prints_its_figures(name, flags, tmp_path, capsys):
    output = tmp_path / "results.json"
    assert main([name, f"--output={output}", *flags], BENCHMARKS) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert output.read_text() == last + "\n"
    figures = json.loads(last)
    assert figures.keys() >= {"commit", "versions", "hardware", "settings"}
    if name == "train":
        assert figures["samples_per_s"] > 0 < figures["share_of_ideal"]
        assert figures["over_lerobot"] is figures["over_template"] is None
        assert set(figures["held_out_error"]) == set(figures["rounds"]) == {OURS}
    elif name == "feed":
        assert figures["spilled_bytes"] == figures["fallback_bytes"] == 0 < figures["fast_over_reader"]
    elif name == "reader":
        assert figures["ours_warm_over_limit"] > 0 < figures["time_to_first_row_s"]
        assert figures["ours_cached_over_limit"] > 0 < figures["cached_cpu_ms_per_row"]
    else:
        assert 0 < figures["stall_share"] < figures["stall_share_measured"] < 1
        assert figures["checkpoint_bytes"] > 0
        for prefix in ("", "driver_"):
            assert figures[f"{prefix}resumed_step"] >= 10
            assert 0 <= figures[f"{prefix}redone_steps"] <= 20


@pytest.mark.slow
def test_the_train_benchmark_has_a_row_for_the_frame_cache(dataset_v3: Path, tmp_path, capsys):
    flags = ["--config=video", f"--root={dataset_v3}", f"--folder={tmp_path}", "--steps=2", "--batch_size=8"]
    flags += ["--cache_epochs=2", "--eval_split=0.2", "--alone_s=0.05", "--peers=[]", "--rounds=1"]
    assert main(["train", *flags], BENCHMARKS) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["cached_over_uncached"] > 0 < figures["first_epoch_over_uncached"]
    (run,) = figures["rounds"][CACHED]
    assert len(run["by_epoch"]) == 2


def test_the_plan_benchmark_measures_and_draws_every_size(tmp_path, capsys):
    flags = ["--episodes=[20, 40]", "--frames=50", "--num_workers=4", "--lanes=8", f"--plot={tmp_path / 'plan.svg'}"]
    assert main(["plan", *flags], BENCHMARKS) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(figures["sizes"]) == ["20", "40"]
    assert 0 < figures["sizes"]["20"]["frames"] < figures["frames"]
    assert figures["seconds"] == sum(figures["stages"].values())
    assert ElementTree.fromstring((tmp_path / "plan.svg").read_text()).tag.endswith("svg")
