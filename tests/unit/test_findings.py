"""One type for the results of all checks."""

import json

import pytest

from vlatune.findings import Finding, finding_of, raise_failed, worst

WARNING = Finding("warn", "statistics", "q01 = q99")
FAILURE = Finding("fail", "rows", "row 3 is frame 7", place="episode 2", expected="frame 3", remedy="fetch it again")


def test_a_finding_reads_as_one_line_and_becomes_json() -> None:
    assert str(FAILURE) == "episode 2: row 3 is frame 7, expected frame 3; fetch it again"
    assert str(WARNING) == "q01 = q99"
    assert json.loads(json.dumps(FAILURE.to_json()))["remedy"] == "fetch it again"


def test_the_worst_level_counts() -> None:
    assert worst([]) == "pass"
    assert worst([FAILURE, WARNING]) == "fail"


def test_only_failures_raise() -> None:
    raise_failed([WARNING])
    with pytest.raises(ValueError, match="row 3 is frame 7"):
        raise_failed([WARNING, FAILURE])


def test_an_error_becomes_a_finding_with_its_remedy() -> None:
    found = finding_of(ValueError("a.mp4: is cut off; fetch it again"), "videos")
    assert (found.level, found.text, found.remedy) == ("fail", "a.mp4: is cut off", "fetch it again")
    assert "KeyError" in finding_of(KeyError("x"), "videos").text
