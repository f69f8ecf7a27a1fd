import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlatune.files import write_json, write_text
from vlatune.report.sinks import MetricsFile, read_jsonl


def write_steps(path, steps):
    sink = MetricsFile(path)
    for step in steps:
        sink.append({"optimizer_step": step, "loss": 1 / step})
    sink.close()


def steps_in(path):
    return [record["optimizer_step"] for record in read_jsonl(path)]


def test_each_line_can_be_read_at_once(tmp_path):
    sink = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    sink.append({"optimizer_step": 1, "loss": 0.5})
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == [{"optimizer_step": 1, "loss": 0.5}]
    sink.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_json_cannot_say_is_refused_by_name(tmp_path, value):
    sink = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(RuntimeError, match=r"metrics\.jsonl: grad_norm: -?(nan|inf) cannot be recorded"):
        sink.append({"optimizer_step": 1, "grad_norm": value})
    sink.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


def test_keep_until_forgets_what_the_checkpoint_does_not_know(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [10, 20, 30, 40])
    sink = MetricsFile(path)
    sink.keep_until(20)
    sink.append({"optimizer_step": 30, "loss": 0.0})
    sink.close()
    assert steps_in(path) == [10, 20, 30]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"], "nothing is left aside"


def test_a_line_in_the_middle_that_is_not_json_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"optimizer_step": 1}\n{"optimi\n{"optimizer_step": 3}\n')
    with pytest.raises(RuntimeError, match="line 2 is not JSON"):
        read_jsonl(path)


@given(cut=st.integers(0, 200))
def test_a_file_cut_anywhere_keeps_its_whole_lines_and_goes_on(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    write_steps(path, range(1, 6))
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    # A line is whole once its closing brace is there; only its newline may be missing.
    whole = list(range(1, data.count(b"}") + 1))
    assert steps_in(path) == whole
    write_steps(path, [99])
    assert steps_in(path) == [*whole, 99]


def test_write_json_replaces_the_file_or_leaves_it(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"verdict": "fine"})
    with pytest.raises(RuntimeError, match=r"summary\.json: time_s: wait: nan"):
        write_json(path, {"time_s": {"wait": float("nan")}})
    with pytest.raises(TypeError):
        write_json(path, {"verdict": object()})
    assert json.loads(path.read_text()) == {"verdict": "fine"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_write_text_survives_half_a_surrogate_pair(tmp_path):
    write_text(tmp_path / "page.html", "a\ud800b")
    assert (tmp_path / "page.html").read_text() == "a?b"


def test_nothing_here_loads_torch_or_ray(tmp_path):
    code = (
        "import sys; import vlatune.report.html, vlatune.report.meters, vlatune.report.sinks;"
        "from vlatune.train.driver.trackers import TensorBoardTracker;"
        f"TensorBoardTracker({str(tmp_path)!r}).finish([]);"
        "sys.exit(str({'torch', 'ray', 'tensorflow', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"
