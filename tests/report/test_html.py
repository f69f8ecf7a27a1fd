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
from run_folders import HOSTILE, TASKS, metrics_line, sample, split_line, write_lines, write_whole_run
from summaries import summary

from vlatune.config import RunConfig
from vlatune.files import write_json
from vlatune.flags import config_from_dict, parse_flags
from vlatune.report.html import EvalSample, load_eval_samples, save_eval_samples, write_report
from vlatune.report.kept_samples import TrainedSample, load_first_batch, save_first_batch
from vlatune.report.summary import write_summary

SECTIONS = [
    "Learning",
    "Speed, and where the time went",
    "Object store against its limit",
    "Starts and checkpoints",
    "Data seen",
    "First batch",
    "What the model saw and what it predicted",
    "Evaluation on held-out episodes",
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


def write_run(run_dir, *, job_name="demo", num_lines=20):
    config = {
        "job_name": job_name,
        "steps": 20,
        "policy": {"type": "pi05", "train": "expert"},
        "dataset": {"root": ["s3://key:hunter2@bucket/set?X-Signature=abc123"], "episodes": None},
        "ray": {"object_store_bytes": 512_000_000},
    }
    write_json(run_dir / "config.json", config)
    write_lines(run_dir / "metrics.jsonl", [metrics_line(number + 1) for number in range(num_lines)])


TIME_S = {"start": 14.0, "wait": 1.0, "compute": 80.0, "checkpoint": 5.0, "total": 100.0}
END = summary(
    optimizer_steps=20,
    verdict="compute-bound: as written by the run",
    versions={"ray": "2.60.0"},
    reader_restarts=2,
    time_s=TIME_S,
)


def write_end(run_dir):
    evaluation = {
        "episodes": [3, 7],
        "num_samples": 96,
        "val_loss": 0.046,
        "action_error": 0.08,
        "mean_action_error": 0.32,
        "blank_images_error": 0.2,
        "blank_sentence_error": 0.08,
        "per_dim_error": {"pan": 0.1, "lift": 0.06, "grip": 0.08},
        "per_horizon_error": [0.05, 0.08, 0.11],
        "action_names": ["pan", "lift", "grip"],
    }
    write_summary(run_dir, END)
    write_json(run_dir / "eval.json", evaluation)


def page_of(run_dir, **options):
    return Page(write_report(run_dir, **options).read_text(encoding="utf-8"))


def test_the_stages_beside_the_loop_are_shown_where_they_were_measured(tmp_path):
    write_run(tmp_path)
    write_end(tmp_path)
    label = "decoding, all readers"
    assert label not in write_report(tmp_path).read_text(encoding="utf-8")
    stages_s = {"decode": 50.0, "transport": 2.0, "collate": 1.0, "copy": 0.0}
    write_summary(tmp_path, replace(END, time_s=TIME_S | stages_s))
    assert label in write_report(tmp_path).read_text(encoding="utf-8")


def test_a_whole_run_is_told_in_order(tmp_path):
    write_run(tmp_path)
    write_end(tmp_path)
    (tmp_path / "checkpoints" / "00000020").mkdir(parents=True)
    page = page_of(tmp_path, eval_samples=[sample()])
    told = ["demo", "compute-bound: as written by the run", "Optimizer steps", *SECTIONS]
    places = [page.texts.index(text) for text in told]
    assert places == sorted(places)
    for figure in (
        "0.0412",
        "31.2",
        "1.2 %",
        "4.8 s",
        "0 bytes",
        "128 MB",
        "25 % of the store",
        "put the cube in the bowl",
    ):
        assert figure in page.texts
    assert "75 % below that of always predicting the mean action" in page.text
    assert "Checkpoints kept, by optimizer step: 20." in page.text
    assert "No evaluation yet" not in page.text


def test_the_page_needs_nothing_from_outside_and_runs_nothing_but_its_own_script(tmp_path):
    page = page_of(write_whole_run(tmp_path))
    assert not re.search(r"https?://|@import|url\(", page.html)
    assert not {"link", "iframe", "object"} & set(page.tags)
    assert page.html.count("<script") == 1
    assert f"<script>{PAGE_JS}</script>" in page.html
    assert all(value.startswith("data:image/") for _, name, value in page.attributes if name in ("src", "href"))
    (allowed,) = [value for _, name, value in page.attributes if name == "content" and value.startswith("default-src")]
    digest = base64.b64encode(hashlib.sha256(PAGE_JS.encode()).digest()).decode()
    assert allowed == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


def test_the_script_makes_no_markup_and_asks_nobody():
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval", "Function", "fetch", "XMLHttp", "import(", "</"):
        assert word not in PAGE_JS


def test_a_chart_brings_the_figures_that_it_draws(tmp_path):
    page = page_of(write_whole_run(tmp_path))
    charts = [json.loads(value) for tag, name, value in page.attributes if (tag, name) == ("figure", "data-chart")]
    assert len(charts) == page.tags.count("svg") > 10
    loss = next(chart for chart in charts if chart["title"].startswith("Loss (log"))
    logged, smoothed, held_out = loss["lines"]
    assert (logged["name"], logged["xs"][:2], logged["ys"][:2]) == ("logged", [1, 2], [1.0, 0.5])
    assert smoothed["xs"] is None  # those of the line before
    assert held_out["xs"] == [50, 100, 150, 200, 250]
    assert (loss["log"], loss["unit"], loss["x"]) == (True, "number", [1.0, 300.0])


def test_strings_of_strangers_stay_text(tmp_path):
    write_run(tmp_path, job_name=HOSTILE)
    write_end(tmp_path)
    evaluation = json.loads((tmp_path / "eval.json").read_text())
    evaluation |= {"action_names": [HOSTILE] * 3, "per_dim_error": {HOSTILE: 0.1}}
    write_json(tmp_path / "eval.json", evaluation)
    write_summary(tmp_path, replace(END, verdict=HOSTILE, versions={HOSTILE: HOSTILE}))
    save_eval_samples(tmp_path, [sample(task=HOSTILE, camera=HOSTILE)])
    page = page_of(tmp_path)
    assert page.tags.count("script") == 1
    assert page.tags.count("img") == 1
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(HOSTILE.replace("\ud800", "?")) >= 5


def test_pictures_and_charts_have_words(tmp_path):
    write_run(tmp_path)
    write_end(tmp_path)
    page = page_of(tmp_path, eval_samples=[sample()])
    assert ("img", "alt", "observation.images.top, episode 3, frame 12") in page.attributes
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == page.tags.count("svg")
    assert any(label.startswith("Loss by optimizer step; logged from 1 to 0.05") for label in labels)


def test_passwords_in_addresses_stay_behind(tmp_path):
    write_run(tmp_path)
    page = page_of(tmp_path)
    assert "s3://bucket/set" in page.text
    assert "hunter2" not in page.html
    assert "abc123" not in page.html


@pytest.mark.parametrize(
    ("num_lines", "said"),
    [
        (0, "nothing was logged"),
        (1, "not finished: 1 optimizer step logged"),
        (20, "not finished: 20 optimizer steps logged"),
    ],
)
def test_a_run_without_an_end_says_so(tmp_path, num_lines, said):
    write_run(tmp_path, num_lines=num_lines)
    page = page_of(tmp_path)
    assert said in page.text
    assert [text for text in page.texts if text in SECTIONS] == SECTIONS
    assert page.text.count("No evaluation yet") == 2
    assert ("No loss was logged" in page.text) == (num_lines == 0)
    drawn = [value for _, name, value in page.attributes if name in ("d", "style", "aria-label")]
    assert not [value for value in drawn if "nan" in value or "inf" in value]


def test_a_torn_last_line_and_missing_files_are_no_obstacle(tmp_path):
    write_run(tmp_path, num_lines=3)
    (tmp_path / "config.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"optimizer_step": 4, "lo')
    page = page_of(tmp_path)
    assert tmp_path.name in page.texts
    assert "3 optimizer steps logged" in page.text


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_page_full_of_photographs_stays_below_two_megabytes(tmp_path):
    write_run(tmp_path, num_lines=5000)
    write_end(tmp_path)
    (first,) = [sample(size=224, dims=14, task="word " * 100_000)]
    cameras = {f"cam{number}": first.images["observation.images.top"] for number in range(3)}
    many = [EvalSample(0, n, first.task, cameras, first.true_TA, first.predicted_TA, first.valid_T) for n in range(20)]
    path = write_report(tmp_path, eval_samples=many)
    assert path.stat().st_size < 2_000_000
    assert "The first 8 of 14 action dimensions are drawn." in path.read_text()


def test_samples_come_back_as_they_were_saved(tmp_path):
    samples = [sample(task=HOSTILE, camera="../odd/name"), sample()]
    save_eval_samples(tmp_path, samples)
    for before, after in zip(samples, load_eval_samples(tmp_path), strict=True):
        assert (after.episode_index, after.frame_index, after.task) == (3, 12, before.task)
        assert list(after.images) == list(before.images)
        for name in ("true_TA", "predicted_TA", "valid_T"):
            assert np.array_equal(getattr(after, name), getattr(before, name))
        assert all(np.array_equal(after.images[camera], before.images[camera]) for camera in before.images)


def test_the_page_is_rewritten_from_what_was_saved(tmp_path):
    write_run(tmp_path)
    write_end(tmp_path)
    samples = [sample()]
    given = page_of(tmp_path, eval_samples=samples).html
    save_eval_samples(tmp_path, samples)
    assert page_of(tmp_path).html == given


def test_a_broken_sample_file_is_named(tmp_path):
    (tmp_path / "eval_samples.npz").write_bytes(b"PK not really")
    with pytest.raises(RuntimeError, match=r"eval_samples\.npz: cannot be read"):
        load_eval_samples(tmp_path)


def test_augmented_pictures_are_shown_beside_those_that_were_read(tmp_path) -> None:
    write_run(tmp_path)
    assert "has not read its first samples" in page_of(tmp_path).html
    save_first_batch(tmp_path, [TrainedSample(3, 4, TASKS[0], {"top": np.full((3, 8, 8), 9, np.uint8)}, {})])
    page = page_of(tmp_path)
    assert page.tags.count("img") == 1
    assert TASKS[0] in page.texts
    assert "augmented" not in page.text
    pictures = {HOSTILE: np.full((3, 8, 8), 9, np.uint8)}
    samples = [TrainedSample(3, 4, HOSTILE, pictures, {HOSTILE: np.full((3, 8, 8), 200, np.uint8)})]
    save_first_batch(tmp_path, samples)
    (loaded,) = load_first_batch(tmp_path)
    np.testing.assert_array_equal(loaded.trained[HOSTILE], samples[0].trained[HOSTILE])
    page = page_of(tmp_path)
    assert page.tags.count("img") == 2
    assert "augmented; evaluation sees them as they were read" in page.text
    assert "episode 3, frame 4" in page.html
    assert HOSTILE not in page.html
    (tmp_path / "first_batch.npz").write_bytes(b"PK not really")
    with pytest.raises(RuntimeError, match=r"first_batch\.npz: cannot be read"):
        load_first_batch(tmp_path)


def test_losses_of_several_robots_are_drawn(tmp_path) -> None:
    write_run(tmp_path)
    assert "Loss by dataset" not in page_of(tmp_path).html
    lines = [metrics_line(step) | {"loss_by_dataset": [0.5, None, 2.0]} for step in (1, 2)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    assert "Loss by dataset" in page_of(tmp_path).html


def test_a_split_loss_is_ranked_and_drawn(tmp_path) -> None:
    write_run(tmp_path)
    assert "Where the loss is" not in page_of(tmp_path).html
    page = page_of(write_whole_run(tmp_path / "whole"))
    assert "Where the loss is" in page.texts
    ranking = page.texts.index("Loss by task, last quarter of the run")
    assert [page.texts[ranking + place] for place in (1, 3, 5)] == list(reversed(TASKS))  # the highest first
    assert "Loss by action dimension, last quarter of the run" in page.texts
    assert "Episodes of the highest loss; the first 10 of 30" in page.texts
    assert "episode 0 (20 samples)" in page.texts


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("metrics.jsonl", {"loss_by_task": ["a"]}, "'loss_by_task': expected an object"),
        ("metrics.jsonl", {"loss_by_task": {"a": "<b>"}}, "expected a whole number"),
        ("metrics.jsonl", {"loss_by_dim": {"a": 1.0}}, "'loss_by_dim': expected a list"),
        ("events.jsonl", {"event": 3}, "'event': expected text"),
        ("events.jsonl", {"time_s": "now"}, "'time_s': expected a whole number"),
        ("data.json", {"datasets": [{"root": 7}]}, "'root': expected text"),
        ("data.json", {"tasks": [None]}, "expected text"),
        ("summary.json", {"loss_by_episode": [{"episode": "x"}]}, "expected a whole number"),
        ("summary.json", {"loss_by_episode": [{"episode": 1}]}, "not as vlatune writes them"),
        ("data.json", {"datasets": [{}]}, "not as vlatune writes them"),
    ],
)
def test_figures_of_another_kind_are_named(tmp_path, file, change, said) -> None:
    write_whole_run(tmp_path)
    line = json.loads(
        (tmp_path / file).read_text().splitlines()[0] if file.endswith("l") else (tmp_path / file).read_text()
    )
    (tmp_path / file).write_text(json.dumps(line | change) + "\n")
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        write_report(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_many_tasks_take_little_room(tmp_path) -> None:
    write_run(tmp_path)
    many = tuple(f"{'word ' * 20}{number}" for number in range(2000))
    write_lines(tmp_path / "metrics.jsonl", [split_line(step, tasks=many) for step in (2, 4)])
    path = write_report(tmp_path)
    assert path.stat().st_size < 200_000
    assert "Loss by task, last quarter of the run; the first 20 of 2,000" in path.read_text()


def test_starts_and_checkpoints_are_on_the_time_line(tmp_path) -> None:
    page = page_of(write_whole_run(tmp_path))
    assert "Started 2 times in 6 min 40 s; started again after optimizer step 100." in page.text
    (chart,) = [
        json.loads(value) for _, name, value in page.attributes if name == "data-chart" and "wall clock" in value
    ]
    assert chart["xName"] == "minutes since the first start"
    assert chart["lines"][1] | {"style": ""} == {
        "name": "checkpoint",
        "style": "",
        "xs": [1.5, 4.833],
        "ys": [100.0, 200.0],
    }
    assert page.html.count('class="again"') == 4  # a line and a key, on the time line and on the loss


def test_data_seen_is_told(tmp_path) -> None:
    page = page_of(write_whole_run(tmp_path))
    assert "2,400 samples were trained on: each of the 800 frames 3 times in the mean." in page.text
    begin = page.texts.index("share of the episodes") + 1
    rest = "of other sentences, of several, or of none that meta/ names"
    assert page.texts[begin : begin + 12] == [
        *(TASKS[1], "20", "50 %"),  # the most frequent first
        *(TASKS[0], "12", "30 %"),
        *(TASKS[2], "2", "5.0 %"),
        *(rest, "6", "15 %"),
    ]
    (tmp_path / "data.json").unlink()
    assert "The datasets were not recorded." in page_of(tmp_path).text


def test_many_sentences_are_folded_up_and_an_older_run_has_them_without_counts(tmp_path) -> None:
    write_whole_run(tmp_path)
    data = json.loads((tmp_path / "data.json").read_text())
    many = {"tasks": [f"task {n}" for n in range(40)], "task_episodes": [1] * 40, "num_tasks": 99}
    (tmp_path / "data.json").write_text(json.dumps(data | many))
    assert "99 tasks, the first 30" in page_of(tmp_path).texts
    del data["task_episodes"]
    (tmp_path / "data.json").write_text(json.dumps(data))
    texts = page_of(tmp_path).texts
    assert "share of the episodes" not in texts
    begin = texts.index("Task") + 1
    assert texts[begin : begin + 3] == list(TASKS)


def test_the_command_is_the_run_and_can_be_pasted(tmp_path) -> None:
    page = page_of(write_whole_run(tmp_path, word=HOSTILE))
    told = page.command
    stored = json.loads((tmp_path / "config.json").read_text())
    assert parse_flags(shlex.split(told)[2:], RunConfig) == config_from_dict(RunConfig, stored, "the run")


def test_a_command_carries_no_secret_and_no_second_command(tmp_path) -> None:
    write_whole_run(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["dataset"]["root"] = ["s3://key:hunter2@bucket/set", "/data/$(touch x)\n; rm -r /\u001b[2J"]
    write_json(tmp_path / "config.json", stored)
    told = page_of(tmp_path).command
    assert told.startswith("vlatune train --recipe=tiny ")
    assert "hunter2" not in told
    assert told.isprintable()
    assert all(word.startswith("--") for word in shlex.split(told)[2:])  # quoted: one word, whatever is in it
    stored["no_such_setting"] = 1
    write_json(tmp_path / "config.json", stored)
    assert "No command can be made of config.json" in page_of(tmp_path).text


def test_a_page_that_is_watched_loads_itself_again_until_the_end(tmp_path) -> None:
    write_run(tmp_path)
    reload = ("meta", "http-equiv", "refresh")
    assert reload not in page_of(tmp_path).attributes
    page = page_of(tmp_path, reload_s=7.0)
    assert reload in page.attributes
    assert ("meta", "content", "7") in page.attributes
    write_end(tmp_path)
    assert reload not in page_of(tmp_path, reload_s=7.0).attributes
