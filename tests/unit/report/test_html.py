"""The report of a run: what it shows, what it leaves out, and what untrusted text cannot do."""

import base64
import hashlib
import json
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest
from unit.report.run_folders import (
    HOSTILE,
    TASKS,
    metrics_line,
    sample,
    write_complete_run,
    write_evaluation,
    write_lines,
    write_started_run,
)

from vlatune.config.flags import config_from_dict, parse_flags
from vlatune.config.settings import RunConfig
from vlatune.report.html import write_report
from vlatune.run.kept_samples import (
    EVAL_SAMPLES_FILE,
    FIRST_BATCH_FILE,
    EvalSample,
    TrainedSample,
    load_samples,
    save_samples,
)
from vlatune.storage.files import write_json

SECTIONS = [
    "Learning",
    "Evaluation on held-out episodes",
    "What the model saw and what it predicted",
    "Where the loss is",
    "Data seen",
    "First batch",
    "Speed",
    "Starts and checkpoints",
    "Settings, versions, command",
]
PAGE_JS = resources.files("vlatune.report").joinpath("page.js").read_text()


class Page(HTMLParser):
    """Tags, attributes and text as a browser sees them; fails when the tags do not nest."""

    VOID = ("meta", "img")

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.html, self.tags, self.attributes, self.open, self.texts, self.command = html, [], [], [], [], ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open and "script" not in self.open:
            self.texts.append(data)
        if "pre" in self.open:
            self.command += data

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def charts(self):
        return [json.loads(value) for tag, name, value in self.attributes if (tag, name) == ("figure", "data-chart")]


def page_of(run_dir, **options):
    return Page(write_report(run_dir, **options).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """Return the page of a complete run."""
    run = write_complete_run(tmp_path_factory.mktemp("runs") / "demo")
    (run / "checkpoints" / "00000020").mkdir(parents=True)
    return page_of(run)


def test_the_report_starts_with_the_training_result(complete):
    learned = next(text for text in complete.texts if text.startswith("loss 1 to 0.003333; lowest action error"))
    speed = SECTIONS.index("Speed") + 1
    verdict = next(text for text in complete.texts if text.startswith("compute-bound: as written by the run"))
    order = ["demo", learned, "Optimizer steps", *SECTIONS[:speed], verdict, *SECTIONS[speed:]]
    positions = [complete.texts.index(text) for text in order]
    assert positions == sorted(positions)
    for text in ("31.2", "1.2 %", "4.8 s", "0 bytes", "1 min 40 s", TASKS[0]):
        assert text in complete.texts
    assert "75 % below the error of always predicting the mean action" in complete.text
    assert "Checkpoints kept, by optimizer step: 20." in complete.text
    assert "No evaluation yet" not in complete.text
    assert "Nothing was spilled to disk, and nothing was allocated on disk." in complete.texts


def test_the_page_loads_nothing_and_runs_only_its_own_script(complete):
    assert not re.search(r"https?://|@import|url\(", complete.html)
    assert not {"link", "iframe", "object"} & set(complete.tags)
    assert complete.html.count("<script") == 1
    assert f"<script>{PAGE_JS}</script>" in complete.html
    assert all(value.startswith("data:image/") for _, name, value in complete.attributes if name in ("src", "href"))
    policies = [
        value for _, name, value in complete.attributes if name == "content" and value.startswith("default-src")
    ]
    digest = base64.b64encode(hashlib.sha256(PAGE_JS.encode()).digest()).decode()
    assert policies == [f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"]
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval", "Function", "fetch", "XMLHttp", "import(", "</"):
        assert word not in PAGE_JS


def test_charts_carry_their_values_and_a_description(complete):
    charts = complete.charts()
    assert len(charts) == complete.tags.count("svg") > 10
    loss = next(chart for chart in charts if chart["title"] == "Loss (log scale)")
    logged, smoothed, held_out = loss["lines"]
    assert (logged["name"], logged["xs"][:2], logged["ys"][:2]) == ("logged", [1, 2], [1.0, 0.5])
    assert smoothed["xs"] is None  # equal to those of the previous line
    assert held_out["xs"] == [50, 100, 150, 200, 250]
    assert loss["x"] == [1.0, 300.0]
    labels = [value for tag, name, value in complete.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == len(charts)
    assert any(label.startswith("Loss (log scale) by optimizer step; logged from 1 to") for label in labels)
    assert ("img", "alt", "observation.images.top, episode 3, frame 12") in complete.attributes


def test_untrusted_text_stays_text(tmp_path):
    write_complete_run(tmp_path, word=HOSTILE)
    config = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", config | {"job_name": HOSTILE})
    save_samples(tmp_path, EVAL_SAMPLES_FILE, [sample(task=HOSTILE, camera=HOSTILE)])
    save_samples(tmp_path, FIRST_BATCH_FILE, [TrainedSample(3, 4, HOSTILE, {}, {})])
    page = page_of(tmp_path)
    assert page.tags.count("script") == 1
    assert page.tags.count("img") == 1
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(HOSTILE.replace("\ud800", "?")) >= 5


@pytest.mark.parametrize("lines", [0, 1, 20])
def test_an_unfinished_run_shows_what_is_missing(tmp_path, lines):
    page = page_of(write_started_run(tmp_path, lines=lines))
    state = f"not finished: {lines} optimizer step" if lines else "nothing was logged"
    assert state in page.text
    without = [] if lines else ["Where the loss is"]
    assert [text for text in page.texts if text in SECTIONS] == [name for name in SECTIONS if name not in without]
    assert page.text.count("No evaluation yet") == 2
    assert ("No loss was logged" in page.text) == (lines == 0)
    drawn = [value for _, name, value in page.attributes if name in ("d", "style", "aria-label")]
    assert not [value for value in drawn if "nan" in value or "inf" in value]
    if lines == 1:  # of 20 steps, 0.26 s each
        assert page.texts[page.texts.index("Time left") + 1] == "4.9 s"


def test_an_incomplete_last_line_and_missing_files_are_tolerated(tmp_path):
    write_started_run(tmp_path, lines=3)
    (tmp_path / "config.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"optimizer_step": 4, "lo')
    page = page_of(tmp_path)
    assert tmp_path.name in page.texts
    assert "3 optimizer steps logged" in page.text


def test_a_folder_that_is_no_run_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_large_runs_make_small_pages(tmp_path):
    tasks = tuple(f"{'word ' * 20}{number}" for number in range(500))
    write_started_run(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", [metrics_line(step, tasks=tasks[:2]) for step in range(1, 3000)])
    write_evaluation(tmp_path)
    first = sample(size=224, dims=14, task="word " * 100_000)
    cameras = {f"cam{number}": first.images["observation.images.top"] for number in range(3)}
    samples = [
        EvalSample(0, n, first.task, cameras, first.true_TA, first.predicted_TA, first.valid_T) for n in range(9)
    ]
    save_samples(tmp_path, EVAL_SAMPLES_FILE, samples)
    page = page_of(tmp_path)
    assert len(page.html) < 2_000_000
    assert "The first 8 of 14 action dimensions are drawn." in page.text
    (tmp_path / EVAL_SAMPLES_FILE).unlink()
    write_lines(tmp_path / "metrics.jsonl", [metrics_line(step, tasks=tasks) for step in (2, 4)])
    page = page_of(tmp_path)
    assert len(page.html) < 200_000
    assert "Loss by task, last quarter of the run; the first 20 of 500" in page.texts


def test_samples_are_read_as_they_were_saved(tmp_path):
    samples = [sample(task=HOSTILE, camera="../odd/name"), sample()]
    save_samples(tmp_path, EVAL_SAMPLES_FILE, samples)
    for before, after in zip(samples, load_samples(tmp_path, EVAL_SAMPLES_FILE, EvalSample), strict=True):
        assert (after.episode_index, after.frame_index, after.task) == (3, 12, before.task)
        assert list(after.images) == list(before.images)
        for name in ("true_TA", "predicted_TA", "valid_T"):
            assert np.array_equal(getattr(after, name), getattr(before, name))
        assert all(np.array_equal(after.images[camera], before.images[camera]) for camera in before.images)
    assert load_samples(tmp_path, FIRST_BATCH_FILE, TrainedSample) == []
    (tmp_path / FIRST_BATCH_FILE).write_bytes(b"PK not really")
    with pytest.raises(RuntimeError, match=r"first_batch\.npz: cannot be read"):
        load_samples(tmp_path, FIRST_BATCH_FILE, TrainedSample)


@pytest.mark.parametrize(
    "change", [{"true_TA": np.zeros(3)}, {"valid_T": np.ones(4)}, {"images": {"a": np.zeros((2, 2))}}]
)
def test_samples_of_other_shapes_are_rejected(tmp_path, change):
    save_samples(tmp_path, EVAL_SAMPLES_FILE, [replace(sample(), **change)])
    with pytest.raises(RuntimeError, match=r"eval_samples\.npz: cannot be read"):
        load_samples(tmp_path, EVAL_SAMPLES_FILE, EvalSample)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("metrics.jsonl", {"loss_by_task": ["a"]}, "'loss_by_task': expected an object"),
        ("metrics.jsonl", {"loss_by_dim": {"a": 1.0}}, "'loss_by_dim': expected a list"),
        ("events.jsonl", {"event": 3}, "'event': expected text"),
        ("data.json", {"datasets": [{}]}, "is missing"),
        ("eval.json", {"rollouts": {"error": 0.1}}, "is missing"),
        ("summary.json", {"loss_by_episode": [{"episode": 1}]}, "not as vlatune writes them"),
    ],
)
def test_values_of_another_type_are_named(tmp_path, file, change, message):
    write_complete_run(tmp_path)
    text = (tmp_path / file).read_text()
    line = json.loads(text.splitlines()[0] if file.endswith("l") else text)
    (tmp_path / file).write_text(json.dumps(line | change) + "\n")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        write_report(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_command_reproduces_the_run(complete, tmp_path):
    stored = json.loads((write_complete_run(tmp_path / "demo") / "config.json").read_text())
    assert parse_flags(shlex.split(complete.command)[2:], RunConfig) == config_from_dict(RunConfig, stored, "the run")


def test_settings_and_command_show_no_secret_and_no_second_command(tmp_path):
    write_complete_run(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["dataset"]["root"] = [
        "s3://key:hunter2@bucket/set?X-Signature=abc123",
        "/data/$(touch x)\n; rm -r /\u001b[2J",
    ]
    write_json(tmp_path / "config.json", stored)
    page = page_of(tmp_path)
    assert page.command.startswith("vlatune train --recipe=tiny ")
    assert "s3://bucket/set" in page.text
    assert "hunter2" not in page.html
    assert "abc123" not in page.html
    assert page.command.isprintable()
    assert all(word.startswith("--") for word in shlex.split(page.command)[2:])  # quoted: one word, whatever is in it
    stored["no_such_setting"] = 1
    write_json(tmp_path / "config.json", stored)
    assert "No command can be made of config.json" in page_of(tmp_path).text
