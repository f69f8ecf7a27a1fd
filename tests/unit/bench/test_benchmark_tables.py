"""The tables of docs/performance.md are the ones that the committed results give."""

from benchmarks.tables import PAGE, read_results, render, update


def test_the_page_shows_the_committed_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == update(page, render(read_results())), "run `python -m benchmarks.tables`"


def test_the_numbers_in_the_readme_are_committed_results() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    end_to_end = [one for one in read_results() if one["bench"] == "train" and one["over_lerobot"] is not None]
    assert end_to_end
    assert [one for one in end_to_end if f"{one['over_lerobot']:.1f} x" not in readme] == []
    assert all(one["spilled_bytes"] == 0 for one in end_to_end)
