import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.run.sinks import MetricsFile, read_jsonl
from vlatune.storage.files import write_json, write_text


def write_steps(path, steps):
    sink = MetricsFile(path)
    for step in steps:
        sink.append({"optimizer_step": step, "loss": 1 / step})
    sink.close()


def steps_in(path):
    return [record["optimizer_step"] for record in read_jsonl(path)]


def test_a_line_can_be_read_immediately(tmp_path):
    sink = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    sink.append({"optimizer_step": 1, "loss": 0.5})
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == [{"optimizer_step": 1, "loss": 0.5}]
    sink.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_rejected(tmp_path, value):
    sink = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(RuntimeError, match=r"metrics\.jsonl: grad_norm: -?(nan|inf) cannot be recorded"):
        sink.append({"optimizer_step": 1, "grad_norm": value})
    sink.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_keep_until_drops_records_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [10, 20, 30, 40])
    sink = MetricsFile(path)
    sink.keep_until(20)
    sink.append({"optimizer_step": 30, "loss": 0.0})
    sink.close()
    assert steps_in(path) == [10, 20, 30]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_in_the_middle_that_is_not_json_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"optimizer_step": 1}\n{"optimi\n{"optimizer_step": 3}\n')
    with pytest.raises(RuntimeError, match="line 2 is not JSON"):
        read_jsonl(path)


@given(cut=st.integers(0, 200))
def test_a_truncated_file_keeps_its_complete_lines_and_can_be_continued(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    write_steps(path, range(1, 6))
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    # A line is complete once its closing brace is there; only its newline may be missing.
    complete = list(range(1, data.count(b"}") + 1))
    assert steps_in(path) == complete
    write_steps(path, [99])
    assert steps_in(path) == [*complete, 99]


def test_write_json_replaces_the_file_or_leaves_it(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"verdict": "fine"})
    with pytest.raises(RuntimeError, match=r"summary\.json: time_s: wait: nan"):
        write_json(path, {"time_s": {"wait": float("nan")}})
    with pytest.raises(TypeError):
        write_json(path, {"verdict": object()})
    assert json.loads(path.read_text()) == {"verdict": "fine"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_write_text_replaces_lone_surrogates(tmp_path):
    write_text(tmp_path / "page.html", "a\ud800b")
    assert (tmp_path / "page.html").read_text() == "a?b"
