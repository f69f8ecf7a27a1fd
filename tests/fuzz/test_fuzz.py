"""A short, fixed part of `make fuzz`: the first cases, and those that once failed."""

import itertools
from pathlib import Path

import pytest
from fuzz import import_all, make_honest, run_cases

CASES = range(60)
ONCE_BAD: tuple[int, ...] = ()
"""Cases that a long run has found."""


@pytest.mark.timeout(280)
def test_no_change_of_a_file_comes_through_as_a_crash(tmp_path: Path) -> None:
    folder, work = tmp_path / "honest", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    make_honest(folder)
    import_all(folder)
    found = list(run_cases(folder, itertools.chain(CASES, ONCE_BAD), jobs=2, work=work, limit_s=60))
    assert not [one for one in found if one.is_bad]
    assert sum(one.result == "refused" for one in found) > len(found) // 3, "the changes are not seen"
