"""The model card of an export, README.md.

The YAML header is for the Hugging Face Hub (library, base model, datasets). Names from the run may
be untrusted, so `_code` escapes markup in them. Local folders are shown by their last part, because
a card is shared.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.checkpoint.local_store import folder_name
from vlatune.config.flags import flags_of, parse_flags, quote_flags
from vlatune.config.settings import RunConfig
from vlatune.console import printable, redacted
from vlatune.export.policy_files import VLATUNE_FILE, rename_map
from vlatune.formatting import format_number, plural, shorten
from vlatune.policies.base import Binding
from vlatune.policies.processors import is_hub_name
from vlatune.registry import get_policy_info
from vlatune.run.run_folder import Evaluation, Run
from vlatune.run.verdict import eval_meaning

CARD = "README.md"
MAX_NAME = 200
MAX_DIMS = 16
IMAGES = "observation.images."
FORM = "width: 640, height: 480, fps: 30"
CARD_SETTINGS = ("recipe", "optimizer", "scheduler", "rename_map", "job_name")
CARD_SETTINGS += ("steps", "batch_size", "grad_accum", "num_workers", "seed")
"""Settings besides dataset and policy that affect the result; paths and logging are not shared."""


@dataclass(frozen=True)
class Exported:
    """Facts of an export, for the model card and the printed summary."""

    folder: Path
    repository: str | None
    """Hub repository, if pushed."""
    config: RunConfig
    """The checkpoint's config."""
    run: Run
    optimizer_step: int
    weights: str
    """`ema` or `trained`."""
    binding: Binding
    """Names of cameras and of the values in state and action."""
    adapter: bool
    has_tokenizer: bool
    """The folder contains a tokenizer."""
    dataset: int | None
    """Index of the exported dataset, if the run was on several robots."""
    loader: str
    """Python code that LeRobot needs before loading, because it does not know the model's size."""

    @property
    def name(self) -> str:
        """Value for --policy.path; a local path would not be portable."""
        return self.repository or "DIR"

    @property
    def evaluation(self) -> Evaluation:
        """Return the metrics of exactly these weights; empty if others or none were evaluated."""
        found = self.run.evaluation
        is_same = (found.get("checkpoint"), found.get("weights")) == (folder_name(self.optimizer_step), self.weights)
        has_errors = None not in (found.get("action_error"), found.get("mean_action_error"))
        return found if is_same and has_errors else Evaluation()


def make_card(done: Exported) -> str:
    parts = [_head(done), _facts(done), _held_out(done), _on_a_robot(done), _in_python(done)]
    parts += [_made_by(done), MOVED if done.has_tokenizer and done.repository is None else ""]
    return redacted("\n\n".join(part for part in parts if part) + "\n")


def _head(done: Exported) -> str:
    """Return the YAML header; JSON strings and lists are valid YAML."""
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
    """True for a hub name that is not also a relative path."""
    return is_hub_name(place) and not Path(place).exists()


def _shareable(place: str, parent: str = "") -> str:
    """Return a URL or hub name as it is, and only the last part of a folder, below `parent`."""
    if "://" in place or _is_on_hub(place):
        return place
    return parent + (Path(place).expanduser().name or "folder")


def _facts(done: Exported) -> str:
    config, info = done.config, get_policy_info(done.config.policy.type)
    mode = config.policy.train
    batch = config.batch_size * config.grad_accum * config.num_workers
    rows = {
        "policy": f"{info.title} (`{info.type}`)",
        "base model": _code(_shareable(config.policy.path)) if config.policy.path else "none: random weights",
        "trained on": ", ".join(_code(_shareable(one)) for one in _roots(config)),
        "what was trained": f"{_code(mode)}: {info.train_modes.get(mode, '')}",
        "recipe": _code(config.recipe) if config.recipe else "none",
        "optimizer steps": f"{done.optimizer_step:,}, each over {plural(batch, 'sample')}",
        "weights": "the moving average of those trained" if done.weights == "ema" else "as trained",
        "in this folder": "adapters for the base model" if done.adapter else "all weights",
    }
    if done.dataset is not None:
        rows["robot"] = f"dims, cameras and statistics of {_code(_shareable(_roots(config)[done.dataset]))}"
    title = _code(done.repository.split("/")[1] if done.repository else config.job_name)
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    how = "LeRobot loads it with the code under In Python." if done.loader else "LeRobot loads it."
    about = f"{info.title}, fine-tuned with vlatune on a LeRobot dataset; {how}"
    return "\n".join([f"# {title}", "", about, "", "| | |", "|---|---|", *lines])


def _held_out(done: Exported) -> str:
    figures, title = done.evaluation, "## On held-out episodes"
    if not figures:
        none = "These weights were not evaluated on held-out episodes (`vlatune eval RUN` before the export)."
        return f"{title}\n\n{none}"
    names = {
        "this policy": figures.get("action_error"),
        "always the mean action": figures.get("mean_action_error"),
        "this policy, images blanked": figures.get("blank_images_error"),
        "this policy, instruction blanked": figures.get("blank_instruction_error"),
    }
    samples, episodes = figures.get("num_samples") or 0, len(figures.get("episodes") or ())
    loss = figures.get("val_loss")
    text = (
        f"Mean absolute error of the predicted action chunks, in the dataset's own units, over {plural(samples, 'sample')} of "
        f"{plural(episodes, 'episode')}; lower is better"
        f"{'' if loss is None else f'; validation loss {format_number(loss)}'}. Open-loop error is not success on a robot."
    )
    dims = {_code(name): error for name, error in list((figures.get("per_dim_error") or {}).items())[:MAX_DIMS]}
    tables = [_table("", "action error", names), _table("action", "error", dims)]
    return "\n\n".join([title, text, *tables, eval_meaning(figures)])


def _table(left: str, right: str, errors: Mapping[str, float | None]) -> str:
    rows = [f"| {name} | {format_number(one)} |" for name, one in errors.items() if one is not None]
    return "\n".join([f"| {left} | {right} |", "|---|---|", *rows])


TINY = """\
This is a tiny model for trials. LeRobot's programs build policies at their published size and cannot load it; the code under
In Python can. For a policy of published size:"""


def _on_a_robot(done: Exported) -> str:
    names = [name.removeprefix(IMAGES) for name, _ in done.binding.cameras]
    cameras = ", ".join(f"{name}: {{type: opencv, index_or_path: {at}, {FORM}}}" for at, name in enumerate(names))
    names_map, trained_rate = rename_map(done.binding), done.config.dataset.action_fps
    rate = trained_rate or done.binding.fps
    flags = [f"--robot.cameras={{{cameras}}}"] if cameras else []
    flags += [f"--rename_map={json.dumps(names_map)}"] if names_map else []
    lines = [
        f"lerobot-rollout {quote_flags([f'--policy.path={done.name}'])} --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=mine",
        *([quote_flags(flags)] if flags else []),
        f'--task="what it should do" --fps={f"{rate:.10g}" if rate else "FPS"} --duration=60',
    ]
    text = "With LeRobot on the robot's computer. Fill in the robot, its port, the indices of its cameras and the task"
    text += "" if rate else ", and FPS, because the recordings have different rates"
    text += "" if done.repository else "; DIR is the folder of this file"
    text += "; `--fps` is the rate of the actions it was trained on (`--dataset.action_fps`)" if trained_rate else ""
    vectors = f"`{VLATUNE_FILE}` lists the values of the state and of an action, in order."
    for key, dims, recorded in done.binding.selected:
        vectors += f" Of the {recorded} recorded dims of `{key}`, counted from 0, it uses {', '.join(map(str, dims))}."
    command = " \\\n    ".join(map(_safe, lines))
    tiny = [TINY] if done.loader else []
    return "\n\n".join(["## On a robot", *tiny, f"{text}:", f"```sh\n{command}\n```", vectors])


def _in_python(done: Exported) -> str:
    place = _safe(json.dumps(done.name))
    lines = [
        "from lerobot.configs import PreTrainedConfig",
        "from lerobot.policies.factory import get_policy_class, make_pre_post_processors",
        *(["", "# LeRobot's classes at the size of this tiny model", done.loader] if done.loader else []),
        "",
        f"config = PreTrainedConfig.from_pretrained({place})",
        f"policy = get_policy_class(config.type).from_pretrained({place})",
        f"preprocess, postprocess = make_pre_post_processors(config, {place})",
        "# action = postprocess(policy.select_action(preprocess(observation)))",
    ]
    return "\n\n".join(["## In Python", "```python\n" + "\n".join(lines) + "\n```"])


def _made_by(done: Exported) -> str:
    config = done.config
    dataset = replace(
        config.dataset, root=tuple(_shareable(one, "/path/to/") for one in config.dataset.root), storage_options=None
    )
    policy = replace(config.policy, path=_shareable(config.policy.path, "/path/to/") if config.policy.path else None)
    plain = parse_flags([f"--recipe={config.recipe}"] if config.recipe else [], RunConfig)
    shown = replace(plain, **{name: getattr(config, name) for name in CARD_SETTINGS}, dataset=dataset, policy=policy)
    found = done.run.summary.versions if done.run.summary else {}
    versions = ", ".join(f"{_safe(name)} {_safe(one)}" for name, one in found.items())
    text = f"Trained by this command{f' ({versions})' if versions else ''}, then written by `vlatune export`:"
    return "\n\n".join(
        ["## How it was made", text, f"```sh\n{_safe(f'vlatune train {quote_flags(flags_of(shown))}')}\n```"]
    )


MOVED = """\
## After moving this folder

LeRobot finds a tokenizer by its path, and policy_preprocessor.json names the path at which this folder was exported.
After moving the folder, write the new path once, in this folder:

```sh
sed -i "s|\\"tokenizer_name\\": \\"[^\\"]*\\"|\\"tokenizer_name\\": \\"$PWD/tokenizer\\"|" policy_preprocessor.json
```"""


def _code(text: str) -> str:
    """Format as inline code, escaping anything that would end it."""
    return f"`{_safe(shorten(text, MAX_NAME)).replace('|', '?') or '?'}`"


def _safe(text: str) -> str:
    return printable(text).replace("`", "?")
