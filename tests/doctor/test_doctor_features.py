"""What `vlatune doctor` says of a run that keeps features: how much room they take, and that nothing is computed or written."""

import json
from pathlib import Path

import pytest

from vlatune import cli
from vlatune.doctor import machine_checks


@pytest.fixture
def words(dataset_v3, tmp_path) -> list[str]:
    return [
        "--recipe=smolvla-tiny",
        f"--dataset.root={dataset_v3}",
        "--dataset.run_length=4",
        "--dataset.window_rows=8",
        "--policy.train=expert",
        "--policy.keep_features=true",
        "--batch_size=4",
        f"--output_dir={tmp_path / 'run'}",
    ]


def ask(capsys, words: list[str]) -> dict[str, list[dict]]:
    capsys.readouterr()
    cli.main(["doctor", *words, "--json"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    return {name: [one for one in found if one["check"] == name] for name in {one["check"] for one in found}}


def test_the_room_that_features_take_is_told_and_a_disk_without_it_fails(words, capsys, monkeypatch, tmp_path):
    found = ask(capsys, words)
    assert {one["status"] for name in ("samples", "first batch", "loss", "reading") for one in found[name]} == {"pass"}
    (told,) = (one for one in found["storage"] if "feature_bytes" in one["figures"])
    assert told["status"] == "pass"
    figures = told["figures"]
    assert figures["feature_bytes"] == figures["missing_bytes"] == 96 * 4 * figures["pictures"] > 0
    assert not Path(tmp_path / "run").exists()
    monkeypatch.setattr(machine_checks, "free_bytes", lambda root: 100)
    (told,) = (one for one in ask(capsys, words)["storage"] if "feature_bytes" in one["figures"])
    assert told["status"] == "fail"
    assert told["flags"] == "--policy.keep_features=false"


def test_a_way_that_keeps_none_fails_where_the_run_is_set_up(words, capsys):
    (told,) = ask(capsys, [*words, "--policy.train=full"])["samples"]
    assert told["status"] == "fail"
    assert "what looks at the pictures is trained" in told["text"]
