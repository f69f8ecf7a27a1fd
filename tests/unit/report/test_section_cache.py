"""The report's section on the frame cache: hits, bytes and time saved."""

import re
from pathlib import Path

from unit.report.run_folders import HOSTILE, metrics_line, write_complete_run, write_lines

from vlatune.report.html import write_report
from vlatune.storage.files import read_json, write_json


def level(**other: object) -> dict[str, object]:
    sizes = {"sample_bytes": 1000, "stored_bytes": 10**6, "share": 0.5, "make_s": 0.5, "read_s": 0.25}
    times = {"epoch_s_without": 60.0, "epoch_s_with": 30.0}
    return {"name": "frames", "is_used": True, "decision": "used", **sizes, **times, **other}


def section_of(folder: Path, *levels: dict[str, object]) -> str:
    data = read_json(folder, "data.json")
    write_json(folder / "data.json", data | {"stores": {"epochs": 3.0, "levels": list(levels)}})
    page = write_report(folder).read_text()
    found = re.search(r"<section[^>]*><h2[^>]*>Frame cache</h2>.*?</section>", page, re.DOTALL)
    return found[0] if found else ""


def test_hits_bytes_and_time_are_sums_over_the_run(tmp_path: Path):
    run = write_complete_run(tmp_path)
    lines = [metrics_line(step) | {"samples_seen": 100 * step} for step in (1, 2, 3)]
    for line, share in zip(lines, (0.0, 0.5, 1.0), strict=True):
        line["cached_share"] = share
    write_lines(run / "metrics.jsonl", lines)
    shown = section_of(run, level())
    assert "150 of 300" in shown
    assert "150 kB" in shown
    assert "37.5 s" in shown  # 150 x 0.25 s


def test_an_unused_cache_states_the_decision_escaped(tmp_path: Path):
    shown = section_of(write_complete_run(tmp_path), level(is_used=False, decision=HOSTILE, make_s=None))
    assert shown
    assert HOSTILE not in shown
    assert shown.count("<table") == 1


def test_the_effect_of_int8_prefixes_on_the_held_out_loss_is_shown(tmp_path: Path):
    run = write_complete_run(tmp_path)
    line = {"optimizer_step": 1, "val_loss": 0.123, "val_action_error": 0.5}
    write_lines(run / "validation.jsonl", [line, line | {"val_loss_int8": 0.124}])
    shown = section_of(run, level(is_used=False))
    assert "0.123" in shown
    assert "0.124" in shown


def test_a_run_without_the_record_has_no_section(tmp_path: Path):
    assert not section_of(write_complete_run(tmp_path))
