"""The pages in a real browser: wide and on a phone, light and dark, with the interaction of every chart.

Marked `browser`: `make test-all ARGS="-m browser"` runs them, and they fail without a browser.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from e2e.report.browser import Browser, Tab, started
from unit.report.run_folders import HOSTILE, write_complete_run

from vlatune import cli
from vlatune.config.flags import config_from_dict, parse_flags
from vlatune.config.settings import RunConfig
from vlatune.formatting import join
from vlatune.report.chart import Chart, Line, Unit, draw, scale_of
from vlatune.report.html import write_report
from vlatune.report.page import make_page

pytestmark = pytest.mark.browser

MAX_PAGE_BYTES = 3_000_000
PAPER = {False: "rgb(251, 251, 250)", True: "rgb(20, 23, 28)"}
SIZES = """document.querySelectorAll('details').forEach(one => { one.open = true });
[...document.querySelectorAll('figure.chart')].map((chart, number) => {
  chart.querySelector('.plot').id = `plot${number}`;
  const room = chart.querySelector('.plot').getBoundingClientRect();
  const drawn = [...chart.querySelectorAll('svg path:not(.grid)')].map(one => one.getTotalLength());
  return {width: room.width, height: room.height, drawn: Math.max(...drawn), name: chart.querySelector('.name').textContent} })"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a demo run with a validation."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    run("demo", f"--output_dir={folder}", "--steps=120")
    return [folder]


def run(*words: str, code: int = 0) -> None:
    """Run a command in a subprocess."""
    done = subprocess.run([sys.executable, "-m", "vlatune.cli", *words], stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == code


@pytest.fixture(scope="module")
def examined(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of doctor for a dataset with a misnamed camera, so that there is a remedy."""
    page = tmp_path_factory.mktemp("doctor") / "doctor.html"
    features = json.loads((dataset_v3 / "meta/info.json").read_text())["features"]
    names = json.dumps({next(name for name in features if "images" in name): "observation.images.elsewhere"})
    words = [f"--dataset.root={dataset_v3}", f"--policy.path={small_base}", f"--rename_map={names}", f"--html={page}"]
    run("doctor", *words, code=1)
    return page


@pytest.fixture(scope="module")
def evaluated(demo: list[Path]) -> Path:
    """Return the page of an evaluation on another dataset."""
    folder = demo[0].parent / "evaluated"
    run("eval", str(demo[0]), f"--dataset.root={demo[0] / 'dataset'}", f"--output_dir={folder}")
    return folder / "eval.html"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two runs with everything that a report can show."""
    folder = tmp_path_factory.mktemp("written")
    return [write_complete_run(folder / "first"), write_complete_run(folder / "second", lr=2e-3, steps=200)]


@pytest.fixture
def page(written: list[Path], tmp_path: Path) -> Path:
    return report_of(written[:1], tmp_path / "page.html")


def report_of(runs: list[Path], file: Path) -> Path:
    assert cli.main(["report", *map(str, runs), f"--output={file}"]) == 0
    return file


WIDTHS, DARK = (1440, 390), (False, True)
VIEWS = [
    *product(("written",), (1, 2), WIDTHS, DARK),
    *product(("demo",), (1,), WIDTHS, (False,)),
    *product(("examined", "evaluated"), (0,), WIDTHS, (False,)),
]


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[1]}-{view[0]}-{view[2]}-{'dark' if view[3] else 'light'}")
def view(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> Iterator[tuple[Tab, bool]]:
    """Open the report of a run, a comparison, or the page of doctor or an evaluation."""
    what, count, width, dark = request.param
    made = request.getfixturevalue(what)
    page = report_of(made[:count], tmp_path / "page.html") if count else made
    assert page.stat().st_size < MAX_PAGE_BYTES
    tab = browser.open(page, width=width, dark=dark)
    yield tab, dark
    tab.close()


def test_every_chart_is_drawn_and_shows_values(view: tuple[Tab, bool]) -> None:
    tab, dark = view
    assert tab.run("getComputedStyle(document.documentElement).backgroundColor") == PAPER[dark]
    fits(tab)
    charts = tab.run(SIZES)
    assert len(charts) >= 5
    for number, chart in enumerate(charts):
        assert min(chart["width"], chart["height"]) > 50, chart
        assert chart["drawn"] > 0, chart  # a single point is a dot: a stroke of hardly any length
        tab.mouse("mouseMoved", *tab.middle_of(f"#plot{number}"))
        shown = f"document.querySelector('#plot{number} .readout')"
        text, left, right = tab.run(
            f"[{shown}.innerText, ...(r => [r.left, r.right])({shown}.getBoundingClientRect())]"
        )
        assert any(one.isdigit() for one in text), chart
        assert left >= 0, chart
        assert right <= tab.run("document.documentElement.clientWidth"), chart
    fits(tab)
    assert tab.console_messages() == []


def fits(tab: Tab) -> None:
    """Check that the page does not scroll sideways, and that no tile stands alone in a row."""
    assert (
        tab.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        == [tab.run("innerWidth")] * 2
    )
    tops = tab.run("[...document.querySelectorAll('.tile')].map(one => one.getBoundingClientRect().top)")
    assert len({tops.count(top) for top in tops}) <= 1, tops


def test_values_are_shown_at_a_touch(browser: Browser, page: Path) -> None:
    tab = browser.open(page, width=390)
    tab.run(SIZES)
    x, y = tab.middle_of("#plot0")
    tab.touch(x + 60, y)
    assert tab.run("document.querySelector('#plot0 .readout').innerText").startswith("optimizer step 2")
    tab.close()


def test_values_are_shown_with_the_arrow_keys(browser: Browser, page: Path) -> None:
    tab = browser.open(page)
    tab.run("document.querySelector('.plot').focus()")
    for _ in range(3):
        tab.press("ArrowRight")
    assert tab.run("document.querySelector('.readout').innerText").startswith("optimizer step 3")
    tab.close()


def test_values_are_formatted_as_in_python(browser: Browser, tmp_path: Path) -> None:
    values: dict[Unit, list[float]] = {
        "number": [0.0, 0.04123, 2.5e-5, 1.2345678, -0.5, 999.94, 1234.0, 12_345_678.0, 2.5e9, 1e12, 0.0001, 3e-12],
        "bytes": [0.0, 1.0, 999.0, 1000.0, 12_345_678.0, 999_600.0, 5.12e8],
        "share": [0.0, 0.0001, 0.0123, 0.0994, 0.41, 1.0],
    }
    charts = []
    for unit, ys in values.items():
        line = Line("it", np.arange(len(ys), dtype=np.float64), np.array(ys))
        charts.append(Chart(unit, (line,), scale_of(ys), unit=unit))
    page = tmp_path / "page.html"
    page.write_text(make_page("values", join(map(draw, charts))))
    tab = browser.open(page)
    for number, chart in enumerate(charts):
        tab.run(f"document.querySelectorAll('.plot')[{number}].focus()")
        for y in chart.lines[0].ys:
            tab.press("ArrowRight")
            text = tab.run(f"document.querySelectorAll('.readout')[{number}].innerText").splitlines()[-1]
            assert text == f"it {chart.format_y(float(f'{y:.5g}') if abs(y) < 10_000 else y)}"
    tab.close()


def test_the_copied_command_reproduces_the_run(browser: Browser, page: Path, written: list[Path]) -> None:
    tab = browser.open(page)
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.click(*tab.middle_of("button.copy"))
    copied = tab.run("navigator.clipboard.readText()")
    assert tab.run("document.querySelector('button.copy').textContent") == "Copied"
    words = shlex.split(copied)
    assert words[:2] == ["vlatune", "train"]
    stored = json.loads((written[0] / "config.json").read_text())
    assert parse_flags(words[2:], RunConfig) == config_from_dict(RunConfig, stored, "the run")
    tab.close()


def test_remedies_of_doctor_are_copied(browser: Browser, examined: Path) -> None:
    tab = browser.open(examined)
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.click(*tab.middle_of(".checks button.copy"))
    assert tab.run("navigator.clipboard.readText()").startswith("--rename_map=")
    assert tab.run("document.querySelectorAll('button.copy').length") >= 2  # of the whole command, too
    tab.close()


def test_untrusted_text_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    run = write_complete_run(tmp_path / "run", word=HOSTILE)
    tab = browser.open(write_report(run))
    tab.run(SIZES)
    for number in range(tab.run("document.querySelectorAll('figure.chart').length")):
        tab.mouse("mouseMoved", *tab.middle_of(f"#plot{number}"))
    assert tab.run("document.scripts.length") == 1
    assert tab.run("[...document.images].every(one => one.src.startsWith('data:image/'))")
    assert tab.console_messages() == []
    assert not [one for one in browser.events if one["method"] == "Page.javascriptDialogOpening"]
    tab.close()


def test_an_injected_script_does_not_run(browser: Browser, page: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.html"
    slipped = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    changed.write_text(page.read_text().replace("<main>", f"<main>{slipped}"))
    tab = browser.open(changed)
    assert "taken" not in tab.run("document.title")
    assert len([one for one in tab.console_messages() if "Content Security Policy" in one]) >= 2
    assert tab.run("document.querySelectorAll('.readout').length") > 5  # the page's own still runs
    tab.close()


def test_the_page_is_complete_without_scripts(browser: Browser, page: Path) -> None:
    tab = browser.open(page, scripts=False)
    assert tab.run("document.querySelectorAll('.readout').length") == 0
    charts = tab.run(SIZES)
    assert all(chart["drawn"] > 0 for chart in charts)
    assert tab.console_messages() == []
    tab.close()
