"""The model card of an export: its README.md, and the pictures in it.

Text for people, with a head that the Hugging Face Hub reads (library, base model, datasets). Names and numbers come from
the checkpoint's settings and from files of the run folder; names may be a stranger's, so each goes through `_code`, out of
which no markup breaks. Folders of this machine are named by their last part alone: a card is passed on.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.checkpoint.local_store import folder_name
from vlatune.config import RunConfig
from vlatune.console import printable, redacted
from vlatune.flags import flags_of, parse_flags, typed
from vlatune.policies.processors import is_hub_name
from vlatune.policies.registry import get_policy
from vlatune.report.chart import Scale, scale_of, span_of, thin
from vlatune.report.formatting import format_number, plural, shorten
from vlatune.report.run_folder import Run
from vlatune.report.verdict import eval_meaning

CARD = "README.md"
LOSS_PLOT, ERROR_PLOT = "loss.png", "action_error.png"
PLOTS = (LOSS_PLOT, ERROR_PLOT)
MAX_NAME = 200
MAX_DIMS = 16
IMAGES = "observation.images."
FORM = "width: 640, height: 480, fps: 30"
LEARNT = (
    "recipe",
    "optimizer",
    "scheduler",
    "rename_map",
    "job_name",
    "steps",
    "batch_size",
    "grad_accum",
    "num_workers",
    "seed",
)
"""Settings, beside those of dataset and policy, that decide what is learnt; where things are kept and told is nobody else's."""
Curve = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class CardFacts:
    """What a card tells of an export."""

    repository: str | None
    """On the hub, where it is pushed."""
    config: RunConfig
    """Of the checkpoint."""
    run: Run
    optimizer_step: int
    weights: str
    """`ema` or `trained`."""
    cameras: tuple[str, ...]
    """The dataset's names: what the robot's observations are called."""
    rename_map: Mapping[str, str]
    """The robot's names -> the policy's."""
    adapter: bool = False
    has_tokenizer: bool = False
    """It carries its own."""
    dataset: int | None = None
    """Of several robots: whose dims, cameras and statistics it has."""

    @property
    def name(self) -> str:
        """For --policy.path; a folder's own path would be one of this machine."""
        return self.repository or "DIR"

    @property
    def evaluation(self) -> dict[str, Any]:
        """Figures of these very weights; none where eval.json is of others, or is not there."""
        found = self.run.evaluation
        same = (found.get("checkpoint"), found.get("weights")) == (folder_name(self.optimizer_step), self.weights)
        numbers = (found.get("action_error"), found.get("mean_action_error"))
        return found if same and all(isinstance(one, int | float) for one in numbers) else {}


def make_card(done: CardFacts) -> dict[str, bytes]:
    """File name -> content: the card and its pictures."""
    plots = make_plots(done)
    parts = [_head(done), _facts(done), _held_out(done, plots), _on_a_robot(done), _in_python(done), _made_by(done)]
    if done.has_tokenizer and done.repository is None:
        parts.append(MOVED)
    return {CARD: redacted("\n\n".join(part for part in parts if part) + "\n").encode(), **plots}


def _head(done: CardFacts) -> str:
    """What the hub reads: YAML, of which JSON's strings and lists are a part."""
    config = done.config
    base, datasets = config.policy.path, [one for one in _roots(config) if _is_on_hub(one)]
    fields: dict[str, Any] = {
        "library_name": "lerobot",
        "pipeline_tag": "robotics",
        "tags": ["lerobot", "robotics", config.policy.type, "vlatune"],
    }
    if base and _is_on_hub(base):
        fields |= {"base_model": base, "base_model_relation": "adapter" if done.adapter else "finetune"}
    if datasets:
        fields["datasets"] = datasets
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items()), "---"])


def _roots(config: RunConfig) -> tuple[str, ...]:
    return config.dataset.root or ((config.dataset.repo_id,) if config.dataset.repo_id else ())


def _is_on_hub(place: str) -> bool:
    """A relative path of two parts looks like a hub's name, too."""
    return is_hub_name(place) and not Path(place).exists()


def _passed_on(place: str) -> str:
    """As it may be told to others: a URL or a hub's name whole, of a folder the last part."""
    return place if "://" in place or _is_on_hub(place) else Path(place).expanduser().name or "folder"


def _facts(done: CardFacts) -> str:
    config, card = done.config, get_policy(done.config.policy.type)
    way = config.policy.train
    batch = config.batch_size * config.grad_accum * config.num_workers
    rows = {
        "policy": f"{card.title} (`{card.type}`)",
        "base model": _code(_passed_on(config.policy.path)) if config.policy.path else "none: random weights",
        "trained on": ", ".join(_code(_passed_on(one)) for one in _roots(config)),
        "what was trained": f"{_code(way)}: {card.train_ways.get(way, '')}",
        "recipe": _code(config.recipe) if config.recipe else "none",
        "optimizer steps": f"{done.optimizer_step:,}, each over {plural(batch, 'sample')}",
        "weights": "the moving average of those trained" if done.weights == "ema" else "as trained",
        "in this folder": "adapters for the base model" if done.adapter else "all weights",
    }
    if done.dataset is not None:
        rows["robot"] = f"that of {_code(_passed_on(_roots(config)[done.dataset]))}: its dims, cameras and statistics"
    title = _code(done.repository.split("/")[1] if done.repository else config.job_name)
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    about = f"{card.title}, fine-tuned with vlatune on a LeRobot dataset; LeRobot loads it by itself."
    return "\n".join([f"# {title}", "", about, "", "| | |", "|---|---|", *lines])


def _held_out(done: CardFacts, plots: Mapping[str, bytes]) -> str:
    figures, pictures = done.evaluation, _pictures(plots)
    if not figures:
        none = "These weights were not evaluated on held-out episodes (`vlatune eval RUN` before the export)."
        return "\n\n".join(["## On episodes that it never saw", none, *pictures])
    names = {
        "action_error": "this policy",
        "mean_action_error": "always the mean action",
        "blank_images_error": "this policy, its pictures blanked",
        "blank_sentence_error": "this policy, its sentence blanked",
    }
    found = {title: figures.get(key) for key, title in names.items()}
    errors = [f"| {title} | {format_number(one)} |" for title, one in found.items() if one is not None]
    basis = f"{plural(figures.get('num_samples') or 0, 'sample')} of {plural(len(figures.get('episodes') or []), 'episode')}"
    text = (
        f"Mean absolute error of the predicted action chunks against the recorded ones, in the dataset's own units, over {basis}, lower is "
        f"better; validation loss {format_number(figures['val_loss']) if figures.get('val_loss') is not None else 'not known'}. "
        f"Open-loop error is not success on a robot."
    )
    dims = list((figures.get("per_dim_error") or {}).items())[:MAX_DIMS]
    by_dim = [f"| {_code(name)} | {format_number(one)} |" for name, one in dims if one is not None]
    tables = ["\n".join(["| | action error |", "|---|---|", *errors])]
    tables += ["\n".join(["| action | error |", "|---|---|", *by_dim])] if by_dim else []
    return "\n\n".join(["## On episodes that it never saw", text, *tables, eval_meaning(figures), *pictures])


def _pictures(plots: Mapping[str, bytes]) -> list[str]:
    titles = {LOSS_PLOT: "Loss by optimizer step", ERROR_PLOT: "Error by place in the action chunk"}
    return [f"![{titles[name]}]({name})" for name in plots]


def _on_a_robot(done: CardFacts) -> str:
    names = [name.removeprefix(IMAGES) for name in done.cameras]
    cameras = ", ".join(f"{name}: {{type: opencv, index_or_path: {at}, {FORM}}}" for at, name in enumerate(names))
    words = [f"--robot.cameras={{{cameras}}}"] if cameras else []
    words += [f"--rename_map={json.dumps(dict(done.rename_map))}"] if done.rename_map else []
    lines = [
        f"lerobot-rollout {typed([f'--policy.path={done.name}'])} --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=mine",
        *([typed(words)] if words else []),
        '--task="what it should do" --fps=30 --duration=60',
    ]
    text = (
        "With LeRobot on the robot's computer. The robot, its port, its cameras' indices and the sentence are yours to fill in; `--fps` is that of "
        f"the recordings{'' if done.repository else ', DIR the folder of this file'}:"
    )
    command = " \\\n    ".join(map(_safe, lines))
    return "\n\n".join(["## On a robot", text, f"```sh\n{command}\n```"])


def _in_python(done: CardFacts) -> str:
    place = _safe(json.dumps(done.name))
    lines = [
        "from lerobot.configs import PreTrainedConfig",
        "from lerobot.policies.factory import get_policy_class, make_pre_post_processors",
        "",
        f"config = PreTrainedConfig.from_pretrained({place})",
        f"policy = get_policy_class(config.type).from_pretrained({place})",
        f"preprocess, postprocess = make_pre_post_processors(config, {place})",
        "# action = postprocess(policy.select_action(preprocess(observation)))",
    ]
    return "\n\n".join(["## In Python", "```python\n" + "\n".join(lines) + "\n```"])


def _made_by(done: CardFacts) -> str:
    config = done.config
    dataset = replace(config.dataset, root=tuple(map(_fill_in, config.dataset.root)), storage_options=None)
    policy = replace(config.policy, path=_fill_in(config.policy.path) if config.policy.path else None)
    plain = parse_flags([f"--recipe={config.recipe}"] if config.recipe else [], RunConfig)
    shown = replace(plain, **{name: getattr(config, name) for name in LEARNT}, dataset=dataset, policy=policy)
    found = done.run.summary.versions if done.run.summary else {}
    versions = ", ".join(f"{_safe(name)} {_safe(one)}" for name, one in found.items())
    text = f"Trained by this command{f' ({versions})' if versions else ''}, then written by `vlatune export`:"
    return "\n\n".join(["## How it was made", text, f"```sh\n{_safe(f'vlatune train {typed(flags_of(shown))}')}\n```"])


def _fill_in(place: str) -> str:
    """In a command: what whoever copies it has to fill in begins with /path/to."""
    return place if "://" in place or _is_on_hub(place) else f"/path/to/{_passed_on(place)}"


MOVED = """\
## After moving this folder

LeRobot finds a tokenizer by its path, and policy_preprocessor.json names the one where this folder was exported to.
After moving the folder, load its processors like this, from wherever you are (`policy` is LeRobot's, `folder` where
this file lies now):

```python
from lerobot.policies.factory import make_pre_post_processors
preprocessor, postprocessor = make_pre_post_processors(policy.config, folder, preprocessor_overrides={"tokenizer_processor": {"tokenizer_name": f"{folder}/tokenizer"}})
```

LeRobot's own programs cannot be told so; for them, write the new path down once, in this folder:

```sh
sed -i "s|\\"tokenizer_name\\": \\"[^\\"]*\\"|\\"tokenizer_name\\": \\"$PWD/tokenizer\\"|" policy_preprocessor.json
```"""


def _code(text: str) -> str:
    """As code, in which nothing is markup, and which no character of it ends."""
    return f"`{_safe(shorten(text, MAX_NAME)).replace('|', '?') or '?'}`"


def _safe(text: str) -> str:
    return printable(text).replace("`", "?")


def make_plots(done: CardFacts) -> dict[str, bytes]:
    """PNG, which every viewer of a card shows."""
    run, plots = done.run, {}
    loss = {"training": _curve(run.metrics, "loss"), "held out": _curve(run.validations, "val_loss")}
    if len(loss["training"][0]) > 1:
        plots[LOSS_PLOT] = draw_curves("loss", "optimizer step", loss)
    by_place = [one for one in done.evaluation.get("per_horizon_error") or () if one is not None]
    if len(by_place) > 1:
        curve = np.arange(1.0, len(by_place) + 1), np.array(by_place, np.float64)
        plots[ERROR_PLOT] = draw_curves("action error", "place in the chunk", {"held out": curve})
    return plots


def _curve(records: list[dict[str, Any]], key: str) -> Curve:
    known = [(one["optimizer_step"], one[key]) for one in records if one.get(key) is not None]
    pairs = np.array(known, np.float64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


SIZE = (840, 340)
PLOT = (80, 40, 820, 290)
"""Left, top, right, bottom."""
INK, PALE, WHITE = (60, 64, 72), (226, 228, 232), (255, 255, 255)
COLOURS = ((37, 99, 235), (217, 119, 6))
LOG_RATIO = 30


def draw_curves(title: str, x_name: str, curves: Mapping[str, Curve]) -> bytes:
    """A line chart on white, as PNG; curves without a point are left out."""
    from PIL import Image, ImageDraw, ImageFont

    drawn = {name: (xs, ys) for name, (xs, ys) in curves.items() if np.isfinite(ys).any()}
    x, y = span_of(np.concatenate([xs for xs, _ in drawn.values()])), _y_scale([ys for _, ys in drawn.values()])
    image = Image.new("RGB", SIZE, WHITE)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(13)
    left, _, right, bottom = PLOT
    for tick in y.ticks(4):
        at = _down(y, tick)
        draw.line([(left, at), (right, at)], fill=PALE)
        draw.text((left - 8, at), format_number(tick), fill=INK, font=font, anchor="rm")
    for tick in x.ticks(5, whole=True):
        draw.text((_across(x, tick), bottom + 8), f"{tick:,.0f}", fill=INK, font=font, anchor="mt")
    draw.text(((left + right) / 2, bottom + 26), x_name, fill=INK, font=font, anchor="mt")
    draw.text((left, 12), title, fill=INK, font=ImageFont.load_default(16))
    for number, (name, (xs, ys)) in enumerate(drawn.items()):
        colour, (xs, ys) = COLOURS[number % len(COLOURS)], thin(xs, ys)
        points = [(_across(x, a), _down(y, b)) for a, b in zip(xs, ys, strict=True) if np.isfinite(b)]
        draw.line(points, fill=colour, width=2, joint="curve")
        for px, py in points if len(points) < 2 else ():
            draw.ellipse([px - 3, py - 3, px + 3, py + 3], fill=colour)
        draw.text((right - 90 * number, 14), name, fill=colour, font=font, anchor="rt")
    packed = io.BytesIO()
    image.save(packed, format="PNG", optimize=True)
    return packed.getvalue()


def _y_scale(values: list[np.ndarray]) -> Scale:
    joined = np.concatenate(values)
    joined = joined[np.isfinite(joined)]
    log = bool(joined.min() > 0 and joined.max() / joined.min() > LOG_RATIO)
    return scale_of(joined, from_zero=not log, log=log)


def _across(x: Scale, value: float) -> float:
    return PLOT[0] + (PLOT[2] - PLOT[0]) * float(x.place(value)) / 100


def _down(y: Scale, value: float) -> float:
    return PLOT[3] - (PLOT[3] - PLOT[1]) * float(y.place(value)) / 100
