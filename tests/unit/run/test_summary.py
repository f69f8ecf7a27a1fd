"""summary.json is read as it was written, and values that no run writes are named."""

import json
from dataclasses import asdict

import pytest
from summaries import SUMMARY, summary

from vlatune.run.summary import read_summary, write_summary


def test_a_summary_is_read_as_it_was_written(tmp_path):
    assert read_summary(tmp_path) is None
    skipped = {"dataset_index": 0, "dataset": "x", "episode": 3, "reason": "cut"}
    complete = summary(checkpoints=(5, 10), versions={"ray": "2.60.0"}, skipped_episodes=(skipped,))
    write_summary(tmp_path, complete)
    assert read_summary(tmp_path) == complete


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer_steps": "12"}, "'optimizer_steps': expected a whole number, found 12"),
        ({"optimizer_steps": True}, "'optimizer_steps': expected a whole number"),
        ({"optimizer_steps": 10**19}, "at most 18 digits"),
        ({"final_loss": None}, "'final_loss': expected a number"),
        ({"final_loss": float("nan")}, "'final_loss': expected a number, found nan"),
        ({"time_s": {"wait": "long"}}, "'time_s': 'wait': expected a number, found long"),
        ({"time_s": []}, "'time_s': expected an object"),
        ({"checkpoints": [5, "x"]}, r"'checkpoints'\[1\]: expected a whole number"),
        ({"checkpoints": 5}, "'checkpoints': expected a list"),
        ({"versions": {"ray": 2.6}}, "'versions': 'ray': expected text"),
        ({"verison": {}}, "'verison' is not known"),
        ({"from_the_future": 1}, "read it with that version"),
    ],
)
def test_values_that_no_run_writes_are_rejected(tmp_path, change, message):
    (tmp_path / "summary.json").write_text(json.dumps(asdict(SUMMARY) | change))
    with pytest.raises(ValueError, match=rf"summary\.json: .*{message}"):
        read_summary(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "3", '{"optimizer_steps": 3}'])
def test_damaged_files_are_named(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(ValueError, match=r"summary\.json"):
        read_summary(tmp_path)
