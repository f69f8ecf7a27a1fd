"""The tables of docs/performance.md are the ones that the committed results give."""

from pathlib import Path

from benchmarks.tables import PAGE, make_pages, read_results, render, render_headline, update


def test_the_pages_show_the_committed_results() -> None:
    for path, tables in make_pages().items():
        page = path.read_text(encoding="utf-8")
        assert page == update(page, tables), "run `python -m benchmarks.tables`"


def test_the_readme_shows_plot_and_table_once_measured(tmp_path: Path) -> None:
    assert render_headline(tmp_path) == ""
    (tmp_path / "table.md").write_text("| vlatune | 0.5 |\n")
    shown = render_headline(tmp_path)
    assert shown.index("results/table.svg") < shown.index("| vlatune | 0.5 |")


def test_a_figure_of_a_result_is_in_its_table() -> None:
    machine = {"cores": 2, "memory_bytes": 24e9}
    one = {
        "bench": "feed",
        "hardware": machine,
        "settings": {"codec": "h264"},
        "wait_share": 0.0123,
        "spilled_bytes": 0,
    }
    table = render([one])
    assert "| h264 | 0.0123 | 0 | 2 cores, 24 GB |" in table
    assert "peak share" not in table


def test_the_numbers_in_the_readme_are_committed_results() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    end_to_end = [one for one in read_results() if one["bench"] == "train" and one["over_lerobot"] is not None]
    assert end_to_end
    assert [one for one in end_to_end if f"{one['over_lerobot']:.1f} x" not in readme] == []
    assert all(one["spilled_bytes"] == 0 for one in end_to_end)
