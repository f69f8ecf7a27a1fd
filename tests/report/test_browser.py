"""The pages in a real browser: wide and on a phone, light and dark, every chart under a hand.

Marked `browser`, as not every machine has one; `make browser-test` runs them, and there they fail without a browser.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, Tab, started
from run_folders import HOSTILE, write_whole_run

from vlatune import cli
from vlatune.config import RunConfig
from vlatune.flags import config_from_dict, parse_flags
from vlatune.report.chart import FORMATS, Chart, Line, draw, scale_of, span_of
from vlatune.report.formatting import join
from vlatune.report.html import write_report
from vlatune.report.page import make_page

pytestmark = pytest.mark.browser

MAX_PAGE_BYTES = 3_000_000
LENGTHS = (200, 120)
PAPER = {False: "rgb(251, 251, 250)", True: "rgb(20, 23, 28)"}
LABELS = """[...document.querySelectorAll('figure.chart')].map(chart =>
  [...chart.querySelectorAll('.plot > .x, .plot > .y')].map(one => [one.className, one.textContent, one.style.cssText]).sort())"""
ROOMS = """[...document.querySelectorAll('figure.chart')].map((chart, number) => {
  chart.querySelector('.plot').id = `plot${number}`;
  const room = chart.querySelector('.plot').getBoundingClientRect();
  const drawn = [...chart.querySelectorAll('svg path:not(.grid)')].map(one => one.getTotalLength());
  return {width: room.width, height: room.height, drawn: Math.max(...drawn), name: chart.querySelector('.name').textContent} })"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two demos of other lengths, made as a newcomer makes one; each comes to a validation."""
    folders = [tmp_path_factory.mktemp("demo") / f"demo{steps}" for steps in LENGTHS]
    for folder, steps in zip(folders, LENGTHS, strict=True):
        run("demo", f"--output_dir={folder}", f"--steps={steps}")
    return folders


def run(*words: str, code: int = 0) -> None:
    """A command as its own process."""
    done = subprocess.run([sys.executable, "-m", "vlatune.cli", *words], stdout=subprocess.DEVNULL, check=False)
    assert done.returncode == code


@pytest.fixture(scope="module")
def examined(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Doctor's page of a dataset one of whose cameras is misnamed, so that there is a remedy."""
    page = tmp_path_factory.mktemp("doctor") / "doctor.html"
    features = json.loads((dataset_v3 / "meta/info.json").read_text())["features"]
    names = json.dumps({next(name for name in features if "images" in name): "observation.images.elsewhere"})
    words = [f"--dataset.root={dataset_v3}", f"--policy.path={small_base}", f"--rename_map={names}", f"--html={page}"]
    run("doctor", *words, code=1)
    return page


@pytest.fixture(scope="module")
def evaluated(demos: list[Path]) -> Path:
    """The page of an evaluation on another dataset."""
    folder = demos[0].parent / "evaluated"
    run("eval", str(demos[0]), f"--dataset.root={demos[1] / 'dataset'}", f"--output_dir={folder}")
    return folder / "eval.html"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs with everything that a report can show, written by hand."""
    folder = tmp_path_factory.mktemp("written")
    return [write_whole_run(folder / "first"), write_whole_run(folder / "second", lr=2e-3, steps=200)]


@pytest.fixture
def page(written: list[Path], tmp_path: Path) -> Path:
    return report_of(written[:1], tmp_path / "page.html")


def report_of(runs: list[Path], file: Path) -> Path:
    assert cli.main(["report", *map(str, runs), f"--output={file}"]) == 0
    return file


WIDTHS, DARK = (1440, 390), (False, True)
VIEWS = [
    *product(("written", "demos"), (1, 2), WIDTHS, DARK),
    *product(("examined", "evaluated"), (0,), WIDTHS, DARK),
]


@pytest.fixture(params=VIEWS, ids=lambda view: f"{view[1]}-{view[0]}-{view[2]}-{'dark' if view[3] else 'light'}")
def view(request: pytest.FixtureRequest, browser: Browser, tmp_path: Path) -> Iterator[tuple[Tab, bool]]:
    """The report of one run, the comparison of two, doctor's page, an evaluation's."""
    what, count, width, dark = request.param
    made = request.getfixturevalue(what)
    page = report_of(made[:count], tmp_path / "page.html") if count else made
    assert page.stat().st_size < MAX_PAGE_BYTES
    tab = browser.open(page, width=width, dark=dark)
    yield tab, dark
    tab.close()


def test_every_chart_is_drawn_reads_out_and_zooms(view: tuple[Tab, bool]) -> None:
    tab, dark = view
    assert tab.run("getComputedStyle(document.documentElement).backgroundColor") == PAPER[dark]
    fits(tab)
    charts, served = tab.run(ROOMS), tab.run(LABELS)
    assert len(charts) >= 5
    for number, chart in enumerate(charts):
        assert min(chart["width"], chart["height"]) > 50, chart
        assert chart["drawn"] > 0, chart  # a single point is a dot: a stroke of hardly any length
        read_out_and_zoom(tab, number, chart, served)
    fits(tab)
    assert tab.complaints() == []


def read_out_and_zoom(tab: Tab, number: int, chart: dict[str, Any], served: list[Any]) -> None:
    x, y = tab.middle_of(f"#plot{number}")
    tab.mouse("mouseMoved", x, y)
    shown = f"document.querySelector('#plot{number} .readout')"
    text, left, right = tab.run(f"[{shown}.innerText, ...(r => [r.left, r.right])({shown}.getBoundingClientRect())]")
    assert any(one.isdigit() for one in text), chart
    assert left >= 0, chart
    assert right <= tab.run("document.documentElement.clientWidth"), chart
    quarter = chart["width"] / 4
    tab.drag((x - quarter, y), (x + quarter / 2, y))
    assert tab.run(f"document.querySelector('#plot{number}').parentElement.classList.contains('zoomed')"), chart
    assert tab.run(LABELS)[number] != served[number], chart
    tab.press("Escape")  # the axes of the whole are written by the script now: they must be those that were served
    assert tab.run(LABELS) == served, chart


def fits(tab: Tab) -> None:
    """Nothing makes the page scroll sideways; no card stands alone in a row."""
    assert (
        tab.run("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        == [tab.run("innerWidth")] * 2
    )
    tops = tab.run("[...document.querySelectorAll('.tile')].map(one => one.getBoundingClientRect().top)")
    assert len({tops.count(top) for top in tops}) <= 1, tops


def test_buttons_zoom_around_what_a_finger_points_at(browser: Browser, page: Path) -> None:
    tab = browser.open(page, width=390)
    served = tab.run(LABELS)
    tab.run(ROOMS)
    x, y = tab.middle_of("#plot0")
    tab.touch(x + 60, y)
    assert tab.run("document.querySelector('#plot0 .readout').innerText").startswith("optimizer step 2")
    for _ in range(3):
        tab.click(*tab.middle_of(".chart .zoom-in"))
    steps = [int(text) for kind, text, _ in tab.run(LABELS)[0] if kind == "x"]
    assert len(steps) >= 2
    assert all(190 <= step <= 290 for step in steps), steps
    tab.click(*tab.middle_of(".chart .zoom-out"))
    wider = [int(text) for kind, text, _ in tab.run(LABELS)[0] if kind == "x"]
    assert wider[-1] - wider[0] > steps[-1] - steps[0]
    tab.click(*tab.middle_of(".chart .show-all"))
    assert tab.run(LABELS) == served
    tab.close()


def test_a_chart_can_be_read_with_the_keys(browser: Browser, page: Path) -> None:
    tab = browser.open(page)
    tab.run("document.querySelector('.plot').focus()")
    for _ in range(3):
        tab.press("ArrowRight")
    assert tab.run("document.querySelector('.readout').innerText").startswith("optimizer step 3")
    tab.close()


def test_values_are_read_out_as_python_writes_them(browser: Browser, tmp_path: Path) -> None:
    values = {
        "number": [0.0, 0.04123, 2.5e-5, 1.2345678, -0.5, 999.94, 1234.0, 12_345_678.0, 2.5e9, 1e12, 0.0001, 3e-12],
        "bytes": [0.0, 1.0, 999.0, 1000.0, 12_345_678.0, 999_600.0, 5.12e8, 3e12, 4e15],
        "share": [0.0, 0.0001, 0.0123, 0.0994, 0.41, 1.0],
    }
    charts = []
    for unit, ys in values.items():
        xs = np.arange(len(ys), dtype=np.float64)
        charts.append(draw(Chart(unit, (Line("it", xs, np.array(ys)),), span_of(xs), scale_of(ys), unit=unit)))  # pyright: ignore[reportArgumentType]
    page = tmp_path / "page.html"
    page.write_text(make_page("values", join(charts)))
    tab = browser.open(page)
    for number, (unit, ys) in enumerate(values.items()):
        tab.run(f"document.querySelectorAll('.plot')[{number}].focus()")
        for y in ys:
            tab.press("ArrowRight")
            told = tab.run(f"document.querySelectorAll('.readout')[{number}].innerText").splitlines()[-1]
            assert told == f"it {FORMATS[unit](y)}"
    tab.close()


def test_the_command_is_copied_and_is_the_run(browser: Browser, page: Path, written: list[Path]) -> None:
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


def test_doctors_remedies_are_copied(browser: Browser, examined: Path) -> None:
    tab = browser.open(examined)
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.click(*tab.middle_of(".checks button.copy"))
    assert tab.run("navigator.clipboard.readText()").startswith("--rename_map=")
    assert tab.run("document.querySelectorAll('button.copy').length") >= 2  # of the whole command, too
    tab.close()


def test_words_of_strangers_do_nothing(browser: Browser, tmp_path: Path) -> None:
    run = write_whole_run(tmp_path / "run", word=HOSTILE)
    tab = browser.open(write_report(run))
    tab.run(ROOMS)
    for number in range(len(tab.run(LABELS))):
        tab.mouse("mouseMoved", *tab.middle_of(f"#plot{number}"))
    assert tab.run("document.scripts.length") == 1
    assert tab.run("[...document.images].every(one => one.src.startsWith('data:image/'))")
    assert tab.complaints() == []
    assert not [one for one in browser.events if one["method"] == "Page.javascriptDialogOpening"]
    tab.close()


def test_a_script_that_slipped_in_does_not_run(browser: Browser, page: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.html"
    slipped = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    changed.write_text(page.read_text().replace("<main>", f"<main>{slipped}"))
    tab = browser.open(changed)
    assert "taken" not in tab.run("document.title")
    assert len([one for one in tab.complaints() if "Content Security Policy" in one]) >= 2
    assert tab.run("document.querySelectorAll('.zoom').length") > 5  # the page's own still runs
    tab.close()


def test_without_scripts_the_page_is_whole(browser: Browser, page: Path) -> None:
    tab = browser.open(page, scripts=False)
    assert tab.run("document.querySelectorAll('.zoom').length") == 0
    charts = tab.run(ROOMS)
    assert all(chart["drawn"] > 0 for chart in charts)
    assert tab.complaints() == []
    tab.close()
