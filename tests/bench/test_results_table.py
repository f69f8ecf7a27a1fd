"""`vlatune bench table`: results out of files and folders, the newest of each kind, beside the bars that hold for it."""

import json
from pathlib import Path
from typing import Any

import pytest

from vlatune.bench.harness import print_last
from vlatune.bench.options import FeedBench
from vlatune.bench.results_table import BARS, bars_of, newest, read_results, rows_of
from vlatune.cli import BENCHMARKS, main

HARDWARE = {"cpu": "a CPU", "cores": 2, "memory_bytes": 25e9}


def result(bench: str, settings: dict[str, Any] | None = None, **figures: Any) -> dict[str, Any]:
    known = {"commit": "0123456789abcdef", "hardware": HARDWARE, "settings": settings or {}}
    return {"bench": bench, **figures, **known}


def trained(kind: str, config: str, **figures: Any) -> dict[str, Any]:
    return result("train", {"policy": {"type": kind}, "config": config, "pin": False}, **figures)


def write(file: Path, *results: dict[str, Any]) -> Path:
    file.write_text("round 1 of 3: vlatune train: 99.0\n" + "".join(json.dumps(one) + "\n" for one in results))
    return file


def bar_of(found: dict[str, Any], figure: str) -> str:
    return next(bar.text() for bar in bars_of(found) if bar.figure == figure)


def test_every_benchmark_has_bars():
    assert set(BARS) == set(BENCHMARKS) - {"table"}


def test_a_table_of_all_bars_with_what_was_measured(tmp_path, capsys):
    feed = result("feed", spilled_bytes=0, fallback_bytes=0, peak_store_share=0.7, wait_share=0.001)
    file = write(tmp_path / "results.jsonl", feed, trained("act", "video", over_lerobot=1.4, spilled_bytes=0))
    assert main(["bench", "table", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| feed |  | peak_store_share | 0.7 | <= 0.6 | **missed** | 01234567 | 2 x a CPU, 25 GB |" in lines
    assert "| feed |  | fast_over_reader | not measured | >= 0.9 |  | 01234567 | 2 x a CPU, 25 GB |" in lines
    assert "| train | act, video | over_lerobot | 1.4 | >= 1 | met | 01234567 | 2 x a CPU, 25 GB |" in lines
    assert all(line.count("|") == lines[0].count("|") for line in lines if line.startswith("|"))
    last = json.loads(lines[-1])
    assert last.keys() >= {"commit", "versions", "hardware", "settings"}
    assert (last["measured"], last["missed"]) == (6, 1)


def test_the_last_of_each_kind_counts_wherever_it_lies(tmp_path):
    write(tmp_path / "a.jsonl", trained("act", "video", over_lerobot=1.0), trained("act", "demo", over_lerobot=2.0))
    write(tmp_path / "b.txt", trained("act", "video", over_lerobot=3.0), result("unknown"))
    (tmp_path / "folder").mkdir()
    found = {one["settings"]["config"]: one["over_lerobot"] for one in newest(read_results([str(tmp_path)]))}
    assert found == {"video": 3.0, "demo": 2.0}


def test_of_the_bars_of_a_figure_the_most_special_holds():
    assert bar_of(trained("pi05", "demo"), "over_lerobot") == ">= 2.3"
    assert bar_of(trained("pi0", "demo"), "over_lerobot") == ">= 1"
    assert bar_of(trained("diffusion", "video"), "over_lerobot") == ">= 2"
    assert bar_of(trained("act", "video"), "over_lerobot") == ">= 1"  # its step decides there, too
    assert bar_of(result("step", {"policy": {"type": "pi05"}}), "heads_speedup") == ">= 1.5"
    assert bar_of(result("step", {"policy": {"type": "smolvla"}}), "heads_speedup") == ">= 1.3"
    assert "share_of_ideal" not in {bar.figure for bar in bars_of(trained("pi0", "demo"))}


def test_what_a_policy_does_not_have_is_no_bar_of_it():
    found = result(
        "step", {"policy": {"type": "act"}}, heads_speedup=None, full_speedup=1.2, host_syncs_per_micro_step=0
    )
    figures = [row.figure for row in rows_of(found)]
    assert figures == ["full_speedup", "host_syncs_per_micro_step", "host_overhead_share"]


def test_a_quotient_is_held_against_its_bar():
    found = result("resume", {"interval": 30}, redone_steps=33, restart_s=20.0)
    rows = {row.figure: (row.measured, row.is_met) for row in rows_of(found)}
    assert rows["redone_steps/interval"] == (pytest.approx(1.1), False)
    assert rows["restart_s"] == (20.0, True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("samples/s: 3\n", "there is no benchmark's last line in it; give --output=FILE to a benchmark"),
        ('{"bench": "feed"}\n', "line 1 is no benchmark's last line: it lacks bench, commit, hardware, settings"),
        ('{"bench": \n', "line 1 is not readable JSON"),
        ('{"bench": "feed", "settings": ' + "[" * 200 + "]" * 200 + "}\n", "nested to a depth of"),
    ],
)
def test_mistakes_are_named(content, says, tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    file.write_text(content)
    assert main(["bench", "table", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_a_missing_file_and_none_at_all(tmp_path, capsys):
    assert main(["bench", "table", str(tmp_path / "nothing")]) != 0
    assert "nothing" in capsys.readouterr().err
    assert main(["bench", "table"]) == 2
    assert "FILE is missing; usage: vlatune bench table FILE..." in capsys.readouterr().err


def test_last_lines_are_appended_to_the_file_of_output(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    for wait_share in (0.5, 0.01):
        print_last("feed", {"wait_share": wait_share}, FeedBench(output=str(file)))
    assert file.read_text() == capsys.readouterr().out
    (found,) = newest(read_results([str(file)]))
    assert found["wait_share"] == 0.01
    assert found["settings"]["store_bytes"] == FeedBench.store_bytes


def test_a_place_that_cannot_be_written_to_is_told_before_anything_runs(tmp_path):
    for place in (tmp_path, tmp_path / "no folder" / "results.jsonl"):
        with pytest.raises(ValueError, match="must be a file in a folder that exists"):
            FeedBench(output=str(place))
