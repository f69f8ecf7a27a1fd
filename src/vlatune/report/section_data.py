"""Render the report's sections on data: datasets and tasks, and the first batch."""

from vlatune.formatting import Html, format_number, format_share, join, plural, shorten, tag
from vlatune.report.page import MAX_TEXT, camera_image, folded, instruction, missing, row, section, shown_setting, table
from vlatune.run.kept_samples import TrainedSample
from vlatune.run.run_folder import DataRecord, Run

MAX_SAMPLES = 6
"""Maximum number of samples on the page; the file may hold more."""
MAX_TASKS, FEW_TASKS = 30, 12
"""Maximum number of tasks that are listed, and that are listed without being collapsed."""


def data_used(run: Run) -> Html:
    """Render episodes, frames, tasks, and the share of each dataset."""
    if run.data is None:
        return section("Data seen", missing("The datasets were not recorded."))
    head = ("Dataset", "episodes", "held out", "frames", "share of the samples")
    rows = []
    for one in run.data["datasets"]:
        counts = (f"{one[key]:,}" for key in ("episodes", "held_out", "frames"))
        rows.append(row(shown_setting(one["root"]), *counts, format_share(one["share"])))
    times = tag("p", _times_seen(run, sum(one["frames"] for one in run.data["datasets"])))
    return section("Data seen", times, table(head, rows, kind="figures"), _tasks(run.data))


def _times_seen(run: Run, frames: int) -> str:
    seen = run.figure("samples_seen")
    if not seen or not frames:
        return "No sample was trained on yet."
    times = seen / frames
    share = f"{format_share(times)} of the {frames:,} frames, each at most once"
    average = f"each of the {frames:,} frames {format_number(times, digits=3)} times on average"
    return f"{plural(seen, 'sample')} were trained on: {share if times < 1 else average}."


def _tasks(data: DataRecord) -> Html:
    """Render the tasks by number of episodes, collapsed if there are many."""
    counts = data.get("task_episodes") or (0,) * len(data["tasks"])
    most_first = sorted(zip(data["tasks"], counts, strict=False), key=lambda item: -item[1])[:MAX_TASKS]
    total = sum(one["episodes"] for one in data["datasets"])
    if (rest := total - sum(counts)) > 0:
        most_first.append(("several tasks, no task, or a task not listed here", rest))
    rows = []
    for task, episodes in most_first:
        name = tag("th", shorten(task, MAX_TEXT) or "(no instruction)", scope="row", dir="auto")
        rows.append(tag("tr", name, tag("td", f"{episodes:,}"), tag("td", format_share(episodes / max(total, 1)))))
    listed = table(("Task", "episodes", "share of the episodes"), rows, kind="figures")
    if data["num_tasks"] <= FEW_TASKS:
        return listed
    first = f", the first {MAX_TASKS}" if data["num_tasks"] > MAX_TASKS else ""
    return folded(f"{plural(data['num_tasks'], 'task')}{first}", listed)


def first_batch(run: Run) -> Html:
    if not run.first_batch:
        return section("First batch", missing("Not recorded: the run has not read its first samples."))
    text = "Some samples of the first optimizer step, as they were read and resized for the policy."
    if any(sample.trained for sample in run.first_batch):
        text += (
            " Each image is followed by its augmented version, which is trained on; evaluation uses the image as read."
        )
    cards = [_card(sample) for sample in run.first_batch[:MAX_SAMPLES]]
    return section("First batch", tag("p", text), tag("div", *cards, class_="batch"))


def _card(sample: TrainedSample) -> Html:
    place = f"episode {sample.episode_index}, frame {sample.frame_index}"
    images = []
    for camera, image in sample.images.items():
        images.append(camera_image(image, camera, place))
        if camera in sample.trained:
            images.append(camera_image(sample.trained[camera], f"{camera}, augmented", place))
    parts = join([tag("div", *images, class_="cameras"), instruction(sample.task), tag("p", place, class_="muted")])
    return tag("article", parts)
