"""The pictures of a report: numbers in, markup out.

Curves come from metrics.jsonl records, bars from summary.json and eval.json, cards from evaluation samples. Each
function expects what it draws to be there; the sections decide what to show and what to say when a part is missing.
Colours and fonts belong to page.css.
"""

import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vlatune.report.chart import Chart, Line, Scale, Unit, draw, scale_of, span_of
from vlatune.report.formatting import (
    Html,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    join,
    shorten,
    tag,
)
from vlatune.report.kept_samples import EvalSample
from vlatune.report.verdict import looked_at

MAX_SPLIT = 6
"""Lines of a chart that splits a loss: as many as page.css has colours for."""
LOG_SCALE_RATIO = 30
"""A loss that falls this far shows its end only on a log scale."""
MAX_DIMS = 8
"""Action dimensions drawn per sample."""
PNG_BYTES = 16_000
"""A larger picture (a photograph) is stored as JPEG, or six samples of three cameras would fill the page."""
MAX_PICTURE_PX = 320
TIME_PARTS = {
    "start": "starting, until the first batch",
    "compute": "computing",
    "kept_own": "kept from computing by other threads of the process",
    "kept_others": "kept from computing by readers or other load on its cores",
    "wait": "waiting for data",
    "checkpoint": "saving checkpoints",
    "validation": "looking at held-out samples",
    "other": "other",
}

STAGES = {
    "decode": "decoding, all readers",
    "transport": "through the object store",
    "collate": "putting batches together",
    "copy": "copying to the device",
}
"""What ran beside the loop; see meters.py."""

Records = Sequence[dict[Any, Any]]
NONE: Records = ()
Format = Callable[[float], str]


def has(metrics: Records, key: str) -> bool:
    """Whether any record has a number under this key."""
    return bool(np.isfinite(_column(metrics, key)).any())


def loss_chart(metrics: Records, validations: Records = NONE, restarts: Sequence[float] = ()) -> Html:
    """The loss as logged, smoothed, and on held-out samples; on a log scale when it falls far. `restarts` are steps."""
    steps, loss = _column(metrics, "optimizer_step"), _column(metrics, "loss")
    lines = (Line("logged", steps, loss, "raw"), Line("smoothed", steps, smooth(loss)))
    if has(validations, "val_loss"):
        held_out = Line("held out", _column(validations, "optimizer_step"), _column(validations, "val_loss"), "truth")
        lines, loss = (*lines, held_out), np.concatenate([loss, held_out.ys])
    span, scale = span_of(steps), loss_scale(loss)
    marks = tuple(step for step in restarts if span.low <= step <= span.high)
    return draw(Chart(f"Loss{told_scale(scale)}", lines, span, scale, height_px=280, marks=marks))


def loss_scale(*values: NDArray[np.float64]) -> Scale:
    """From zero; by the logarithm where values fall far, as a line along the bottom would say nothing."""
    seen = np.concatenate(values)
    seen = seen[np.isfinite(seen)]
    log = bool(seen.size and (seen > 0).all() and seen.max() / seen.min() > LOG_SCALE_RATIO)
    return scale_of(*values, log=log, from_zero=not log)


def told_scale(scale: Scale) -> str:
    return " (log scale)" if scale.log else ""


def validation_chart(validations: Records) -> Html:
    """Action error on held-out samples while it trained."""
    return curve(validations, "val_action_error", "Open-loop action error on held-out samples", noisy=False)


def split_loss_chart(title: str, metrics: Records, key: str, labels: Mapping[str | int, str]) -> Html:
    """Parts that a loss was split into, over the run, smoothed: of the dict or list under `key` those that are labelled."""
    kept = [record for record in metrics if record.get(key)]
    steps, split = _column(kept, "optimizer_step"), [_parts(record[key]) for record in kept]
    lines = tuple(
        Line(shorten(label, 60), steps, smooth(_column(split, part)), f"run{number}")
        for number, (part, label) in enumerate(itertools.islice(labels.items(), MAX_SPLIT))
    )
    scale = loss_scale(*(line.ys for line in lines))
    return draw(Chart(title + told_scale(scale), lines, span_of(steps), scale))


def late_means(metrics: Records, key: str) -> dict[str | int, float]:
    """The mean of each part of a split loss over the last quarter of the lines that have it, the highest first."""
    kept = [_parts(record[key]) for record in metrics if record.get(key)]
    sums: dict[str | int, tuple[float, int]] = {}
    for part, loss in (item for one in kept[len(kept) * 3 // 4 :] for item in one.items() if item[1] is not None):
        total, count = sums.get(part, (0.0, 0))
        sums[part] = total + loss, count + 1
    means = {part: total / count for part, (total, count) in sums.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _parts(split: Mapping[str, Any] | Sequence[Any]) -> dict[Any, Any]:
    return dict(split) if isinstance(split, Mapping) else dict(enumerate(split))


def curve(
    metrics: Records,
    key: str,
    title: str,
    *,
    noisy: bool = True,
    unit: Unit = "number",
    least_top: float = 0.0,
) -> Html:
    """One logged quantity over the run, from zero up; an axis below `least_top` would make a drama of noise."""
    steps, values = _column(metrics, "optimizer_step"), _column(metrics, key)
    logged = Line("logged", steps, values, "raw" if noisy else "main")
    lines = (logged, Line("smoothed", steps, smooth(values))) if noisy else (logged,)
    scale = scale_of(values, [least_top], from_zero=True)
    return draw(Chart(title, lines, span_of(steps), scale, unit=unit, height_px=130, keys=False))


def learning_charts(metrics: Records) -> Html:
    """Learning rate and gradient norm, side by side."""
    parts = []
    if has(metrics, "lr"):
        parts.append(curve(metrics, "lr", "Learning rate", noisy=False))
    if has(metrics, "grad_norm"):
        parts.append(curve(metrics, "grad_norm", "Gradient norm"))
    return tag("div", *parts, class_="pair")


def speed_charts(metrics: Records) -> Html:
    """Samples per second, and the shares of the time spent waiting and kept from computing, side by side."""
    parts = []
    if has(metrics, "samples_per_s"):
        parts.append(curve(metrics, "samples_per_s", "Samples per second"))
    if has(metrics, "wait_share"):
        title = "Share of the time waiting for data"
        parts.append(curve(metrics, "wait_share", title, unit="share", least_top=0.1))
    if has(metrics, "kept_share"):
        title = "Share of the time kept from computing"
        parts.append(curve(metrics, "kept_share", title, unit="share", least_top=0.1))
    if has(metrics, "other_threads_share"):
        title = "Cores taken by other threads of the training process"
        parts.append(curve(metrics, "other_threads_share", title, least_top=0.1))
    return tag("div", *parts, class_="pair")


def store_chart(metrics: Records, capacity_bytes: float | None) -> Html:
    """Bytes in the object store over the run, against what it can hold."""
    steps, used = _column(metrics, "optimizer_step"), _column(metrics, "object_store_bytes")
    limit = None if capacity_bytes is None else (f"capacity {format_bytes(capacity_bytes)}", float(capacity_bytes))
    scale = scale_of(used, [capacity_bytes or 0.0], from_zero=True)
    lines = (Line("in the object store", steps, used),)
    title = "Bytes in the object store"
    return draw(Chart(title, lines, span_of(steps), scale, unit="bytes", limit=limit, height_px=180))


def progress_chart(events: Records) -> Html:
    """How far the run was when, by the wall clock: starts, checkpoints and the end. A flat part is time without progress that
    was kept."""
    begin_s = events[0]["time_s"]
    word, seconds = _clock_unit(events[-1]["time_s"] - begin_s)
    at = np.array([(event["time_s"] - begin_s) / seconds for event in events], dtype=np.float64)
    steps = _column(events, "optimizer_step")
    kinds = np.array([event["event"] for event in events])
    saved = kinds == "checkpoint"
    lines = [Line("optimizer step", at, steps)]
    if saved.any():
        lines.append(Line("checkpoint", at[saved], steps[saved], "run1", dots=True))
    marks = tuple(at[kinds == "start"][1:].tolist())
    title, scale = "Optimizer steps by the wall clock", scale_of(steps, from_zero=True)
    x_name = f"{word} since the first start"
    return draw(Chart(title, tuple(lines), span_of(at), scale, x_name=x_name, height_px=180, marks=marks))


def _clock_unit(total_s: float) -> tuple[str, float]:
    """The unit in which a run's length is a number of two or three digits."""
    units = (("hours", 3600.0), ("minutes", 60.0))
    return next(((word, seconds) for word, seconds in units if total_s >= 3 * seconds), ("seconds", 1.0))


def time_bar(time_s: dict[str, float]) -> Html:
    """One bar cut by what the time was spent on, with its legend as a table."""
    parts = {name: max(0.0, time_s[name]) for name in TIME_PARTS if name in time_s}
    parts["other"] = max(0.0, time_s.get("total", 0.0) - sum(parts.values()))
    whole = sum(parts.values()) or 1.0
    if parts["other"] < 0.005 * whole:  # rounding, not a part of its own
        del parts["other"]
    cut = (
        tag("i", class_=f"t-{name}", style=f"flex-grow:{s / whole:.5f}", title=TIME_PARTS[name])
        for name, s in parts.items()
        if s
    )
    rows = (
        tag(
            "tr",
            tag("th", tag("i", class_=f"t-{name}"), TIME_PARTS[name], scope="row"),
            tag("td", format_seconds(s)),
            tag("td", format_share(s / whole)),
        )
        for name, s in parts.items()
    )
    described = ", ".join(f"{TIME_PARTS[name]} {format_share(s / whole)}" for name, s in parts.items())
    bar = tag("div", *cut, class_="stack", role="img", aria_label=f"Where the time went: {described}")
    return join([bar, tag("table", tag("tbody", *rows), class_="legend")])


def stage_bars(time_s: dict[str, float]) -> Html:
    """Seconds of what prepared the data beside the loop, against those of computing."""
    rows = [(label, time_s[stage], "faded") for stage, label in STAGES.items() if stage in time_s]
    rows.append(("computing, in the loop", time_s.get("compute", 0.0), "main"))
    name = "Seconds of preparing data, beside the loop, all workers together"
    return bars(rows, name=name, format_value=format_seconds)


def ranked_bars(rows: Sequence[tuple[str, float]], *, name: str, most: int) -> Html:
    """The first of (label, value) as bars, with how many there are."""
    rest = f"; the first {most} of {len(rows):,}" if len(rows) > most else ""
    return bars([(label, value, "main") for label, value in rows[:most]], name=name + rest)


def bars(rows: Sequence[tuple[str, float, str]], *, name: str, format_value: Format | None = None) -> Html:
    """A table of (label, value, class): label, bar, figure."""
    write = format_value or partial(format_number, digits=3)
    longest = max((abs(value) for _, value, _ in rows), default=0.0) or 1.0
    body = (
        tag(
            "tr",
            tag("th", label, scope="row"),
            tag(
                "td", tag("i", class_=f"bar {style}", style=f"width:{100 * abs(value) / longest:.2f}%"), class_="track"
            ),
            tag("td", write(value), class_="figure"),
        )
        for label, value, style in rows
    )
    return tag("table", tag("caption", name), tag("tbody", *body), class_="bars")


def eval_bars(evaluation: dict[str, Any]) -> Html:
    """The errors that say together what was learnt."""
    named = [
        ("the model", evaluation["action_error"], "main"),
        ("always the mean action", evaluation["mean_action_error"], "plain"),
        ("the model, pictures blanked", evaluation.get("blank_images_error"), "faded"),
        *(
            (f"the model, {shorten(camera.split('.')[-1], 60)} alone blanked", error, "faded")
            for camera, error in (evaluation.get("blank_camera_errors") or {}).items()
        ),
        ("the model, sentence blanked", evaluation.get("blank_sentence_error"), "faded"),
    ]
    rows = [(label, float(error), style) for label, error, style in named if error is not None]
    return bars(rows, name=f"Action error on {looked_at(evaluation)}; shorter is better")


def dim_bars(per_dim_error: dict[str, float]) -> Html:
    return bars(
        [(name, float(error), "main") for name, error in per_dim_error.items()], name="Error by action dimension"
    )


def horizon_chart(per_horizon_error: Sequence[float]) -> Html:
    """The error grows the further ahead the action lies: how fast?"""
    errors = np.asarray(per_horizon_error, dtype=np.float64)
    ahead = np.arange(len(errors), dtype=np.float64)
    lines, scale = (Line("error", ahead, errors),), scale_of(errors, from_zero=True)
    return draw(
        Chart("Error by position in the chunk", lines, span_of(ahead), scale, x_name="actions ahead", height_px=150)
    )


def rollout_horizon_chart(rollouts: dict[str, Any]) -> Html:
    """The error by place in the chunk, of all dims together and of the worst few: further ahead is harder."""
    errors = np.asarray(rollouts["per_horizon_error"], dtype=np.float64)
    ahead = np.arange(len(errors), dtype=np.float64)
    by_dim = {name: np.asarray(of, dtype=np.float64) for name, of in rollouts["per_dim_horizon_error"].items()}
    worst = sorted(by_dim, key=lambda name: -float(np.nan_to_num(by_dim[name]).sum()))[:2]
    lines = (
        Line("all dims", ahead, errors),
        *(
            Line(shorten(name, 40), ahead, by_dim[name], style)
            for name, style in zip(worst, ("run1", "run2"), strict=False)
        ),
    )
    scale = scale_of(*(line.ys for line in lines), from_zero=True)
    return draw(
        Chart("Error by position in the chunk", lines, span_of(ahead), scale, x_name="actions ahead", height_px=150)
    )


def rollout_charts(rollout: EvalSample, scales: Sequence[Scale], names: Sequence[str]) -> Html:
    """Recorded and predicted actions over a whole episode, one chart per dimension."""
    frames = np.arange(len(rollout.valid_T), dtype=np.float64)
    charts = [
        draw(
            Chart(
                names[dim],
                (
                    Line("recorded", frames, rollout.true_TA[:, dim].astype(np.float64), "truth"),
                    Line("predicted", frames, rollout.predicted_TA[:, dim].astype(np.float64)),
                ),
                span_of(frames),
                scale,
                x_name="frame",
                height_px=110,
                y_ticks=2,
                keys=False,
            )
        )
        for dim, scale in enumerate(scales)
    ]
    return tag("div", *charts, class_="dims")


def dim_scales(samples: Sequence[EvalSample]) -> list[Scale]:
    """One scale per action dimension over all samples, so that cards compare and small noise looks small."""
    num_dims = min(sample.true_TA.shape[1] for sample in samples)
    shown = [(sample.true_TA[sample.valid_T], sample.predicted_TA[sample.valid_T]) for sample in samples]
    return [scale_of(*(part[:, dim] for pair in shown for part in pair)) for dim in range(min(num_dims, MAX_DIMS))]


def action_charts(sample: EvalSample, scales: Sequence[Scale], names: Sequence[str]) -> Html:
    """True and predicted action, one small chart per dimension; the part past the episode's end is shaded."""
    charts = [draw(_action_chart(sample, dim, scale, names[dim])) for dim, scale in enumerate(scales)]
    return tag("div", *charts, class_="dims")


def picture(image: np.ndarray, *, alt: str) -> Html:
    """Pixels as an <img> with its bytes inside."""
    height, width = _channels_last(image).shape[:2]
    return tag("img", src=_data_url(_channels_last(image)), alt=alt, width=width, height=height)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over as many neighbours on the left as on the right, a twentieth of the run in all; gaps stay gaps.

    The window narrows towards both ends, so that neither a steep start nor the last value is bent.
    """
    seen, positions = np.isfinite(values), np.arange(len(values))
    sums, counts = (np.concatenate([[0.0], np.cumsum(part)]) for part in (np.where(seen, values, 0.0), seen))
    half = np.minimum(len(values) // 40, np.minimum(positions, positions[::-1]))
    begin, end = positions - half, positions + half + 1
    means = (sums[end] - sums[begin]) / np.maximum(counts[end] - counts[begin], 1)
    return np.where(seen, means, np.nan)


def _column(metrics: Records, key: str | int) -> NDArray[np.float64]:
    """One key of all records; NaN where a record lacks it."""
    return np.array([np.nan if record.get(key) is None else record[key] for record in metrics], dtype=np.float64)


def _action_chart(sample: EvalSample, dim: int, scale: Scale, name: str) -> Chart:
    ahead = np.arange(len(sample.valid_T), dtype=np.float64)
    true_T, predicted_T = (
        np.where(sample.valid_T, action_TA[:, dim], np.nan) for action_TA in (sample.true_TA, sample.predicted_TA)
    )
    num_valid = int(sample.valid_T.sum())
    return Chart(
        name,
        (Line("true", ahead, true_T, "truth"), Line("predicted", ahead, predicted_T)),
        span_of(ahead),
        scale,
        x_name="actions ahead",
        height_px=84,
        y_ticks=2,
        x_ticks=2,
        keys=False,
        shade_from=max(num_valid - 1, 0) if num_valid < len(ahead) else None,
    )


def _channels_last(image: np.ndarray) -> np.ndarray:
    if image.dtype != np.uint8 or image.ndim != 3 or 3 not in (image.shape[0], image.shape[2]):
        raise ValueError(f"a picture must be uint8 (3, H, W) or (H, W, 3), not {image.dtype} {image.shape}")
    return image.transpose(1, 2, 0) if image.shape[0] == 3 else image


def _data_url(image_HWC: np.ndarray) -> str:
    import cv2  # here, not above: a run without pictures need not load it

    bgr = np.ascontiguousarray(image_HWC[..., ::-1])
    longest = max(bgr.shape[:2])
    if longest > MAX_PICTURE_PX:
        shrink = MAX_PICTURE_PX / longest
        bgr = cv2.resize(bgr, None, fx=shrink, fy=shrink, interpolation=cv2.INTER_AREA)
    kind, data = "png", cv2.imencode(".png", bgr)[1].tobytes()
    if len(data) > PNG_BYTES:
        kind, data = "jpeg", cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, 88])[1].tobytes()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
