"""summary.json as a type: what is written comes back, and what cannot have been written is named."""

import json

import pytest
from summaries import WHOLE, summary

from vlatune.dataset.order.shuffle_meter import Figure, Shuffle
from vlatune.report.summary import Summary, read_summary, write_summary

SHUFFLE = Shuffle(32, 1800, Figure(29.9, 29.65), Figure(0.0001, 0.0), Figure(10.0, 548.0), 0.92).to_json()


def test_what_is_written_comes_back(tmp_path):
    assert read_summary(tmp_path) is None
    whole = summary(
        shuffle=SHUFFLE,
        checkpoints=(5, 10),
        versions={"ray": "2.60.0"},
        skipped_episodes=({"dataset_index": 0, "dataset": "x", "episode": 3, "reason": "cut"},),
        wait_s_by_worker=(1.0, 2.0),
    )
    write_summary(tmp_path, whole)
    assert read_summary(tmp_path) == whole


def test_a_file_of_before_lacks_what_came_later(tmp_path):
    kept = ("optimizer_steps", "final_loss", "samples_per_s", "wait_share", "time_to_first_batch_s", "spilled_bytes")
    kept += ("fallback_bytes", "peak_object_store_bytes", "restarts")
    old = Summary.from_json({name: WHOLE.to_json()[name] for name in kept}, "old")
    assert (old.versions, old.reader_restarts, old.checkpoints) == ({}, None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer_steps": "12"}, "'optimizer_steps': expected a whole number, found 12"),
        ({"optimizer_steps": True}, "'optimizer_steps': expected a whole number"),
        ({"final_loss": None}, "'final_loss': expected a number"),
        ({"final_loss": float("nan")}, "'final_loss': expected a number, found nan"),
        ({"time_s": {"wait": "long"}}, "'time_s': 'wait': expected a number, found long"),
        ({"time_s": []}, "'time_s': expected an object"),
        ({"checkpoints": [5, "x"]}, r"'checkpoints'\[1\]: expected a whole number"),
        ({"checkpoints": 5}, "'checkpoints': expected a list"),
        ({"versions": {"ray": 2.6}}, "'versions': 'ray': expected text"),
        ({"verison": {}}, "'verison' is not known"),
        ({"from_the_future": 1}, "read it with that one"),
    ],
)
def test_what_no_run_writes_is_refused_by_name(tmp_path, change, said):
    (tmp_path / "summary.json").write_text(json.dumps(WHOLE.to_json() | change))
    with pytest.raises(ValueError, match=rf"summary\.json: .*{said}"):
        read_summary(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"), [("", "is not readable JSON"), ("{", "is not readable JSON"), ("3", "expected an object")]
)
def test_a_file_that_is_none_is_named(tmp_path, text, said):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=rf"summary\.json: {said}"):
        read_summary(tmp_path)


def test_a_missing_figure_is_named(tmp_path):
    values = WHOLE.to_json()
    del values["restarts"]
    (tmp_path / "summary.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"summary\.json: 'restarts' is missing"):
        read_summary(tmp_path)
