"""`--from_lerobot`: a `train_config.json` of LeRobot, or a command line of `lerobot-train`, as settings of our own.

Every field of LeRobot's `TrainPipelineConfig` has a row in ROWS (a test holds the table to the real class): the flag of ours that
means the same, the reason why it may be left out, or the reason why there is nothing like it; then a value other than LeRobot's
default is refused. What is not given has LeRobot's default, not ours, so that the run is the one that `lerobot-train` would make.
Values are plain JSON and text; nothing of LeRobot is imported.
"""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlatune.errors import did_you_mean
from vlatune.files import parse_json, read_file
from vlatune.policies.registry import get_policy, policy_types

REQUIRED: Any = object()
PROGRAMS = ("lerobot-train", "lerobot_train", "lerobot_train.py", "train.py", "lerobot.scripts.lerobot_train")
PROCESSES = ("--num_processes", "--num-processes")
MAX_REFUSED, MAX_TEXT, MAX_PARTS = 20, 200, 8
"""Fields that a message names, characters of each, and parts of a name that are looked at: a file may hold a million."""


@dataclass(frozen=True)
class Row:
    """What becomes of one field of LeRobot's, or of all below a name that ends with a dot."""

    default: Any = REQUIRED
    """LeRobot's own."""
    ours: str | None = None
    """Our flag of the same meaning."""
    why: str = ""
    """Why there is none."""
    harmless: bool = False
    """Whether it may be left out, as it changes nothing that is learnt."""


def same(ours: str, default: Any = REQUIRED) -> Row:
    return Row(default, ours)


def left_out(why: str) -> Row:
    return Row(why=why, harmless=True)


def unlike(default: Any, why: str) -> Row:
    return Row(default, why=why)


BY_THE_BASE = "the base's config.json says it; change it there"
READING = "reading is sized by the machine (docs/sizing.md)"
ROBOT = "it decides how the robot or the hub is served, not what is learnt"
ROWS: Mapping[str, Row] = {
    "dataset.repo_id": same("dataset.repo_id"),
    "dataset.root": same("dataset.root", None),
    "dataset.episodes": same("dataset.episodes", None),
    "dataset.revision": same("dataset.revision", None),
    "dataset.eval_split": same("dataset.eval_split", 0.0),
    "dataset.repo_type": unlike(
        "dataset", "storage buckets of the hub are not read; fetch the dataset, and give its folder"
    ),
    "dataset.streaming": left_out("datasets are always read as they are needed"),
    "dataset.video_backend": left_out("PyAV decodes, to the same frames"),
    "dataset.return_uint8": left_out("pixels are uint8 up to the device anyway"),
    "dataset.depth_output_unit": left_out("depth is not read"),
    "dataset.use_imagenet_stats": same("dataset.use_imagenet_stats", True),
    "dataset.image_transforms.enable": same("dataset.image_transforms.enable", False),
    "dataset.image_transforms.max_num_transforms": same("dataset.image_transforms.max_num_transforms", 3),
    "dataset.image_transforms.random_order": same("dataset.image_transforms.random_order", False),
    "dataset.image_transforms.tfs": same("dataset.image_transforms.tfs"),
    "env": unlike(None, "nothing is simulated while training; `vlatune eval RUN --env.type=...` does it afterwards"),
    "env.": left_out("see env"),
    "reward_model": unlike(None, "reward models are not trained here"),
    "reward_model.": left_out("see reward_model"),
    "sample_weighting": unlike(None, "samples are weighted by dataset alone (--dataset.weight)"),
    "sample_weighting.": left_out("see sample_weighting"),
    "output_dir": same("output_dir", None),
    "job_name": same("job_name", None),
    "resume": unlike(False, "a run of LeRobot's cannot be continued; start from its weights with --policy.path"),
    "checkpoint_path": left_out("a run of LeRobot's cannot be continued"),
    "seed": same("seed", 1000),
    "cudnn_deterministic": same("deterministic", False),
    "num_workers": left_out(f"{READING}; our --num_workers counts training workers"),
    "batch_size": same("batch_size", 8),
    "prefetch_factor": left_out(READING),
    "persistent_workers": left_out(READING),
    "dataloader_multiprocessing_context": left_out(READING),
    "steps": same("steps", 100_000),
    "env_eval_freq": left_out("nothing is simulated while training"),
    "log_freq": same("log_freq", 200),
    "eval_steps": same("eval_freq", 0),
    "max_eval_samples": same("eval_samples", 0),
    "tolerance_s": same("dataset.tolerance_s", 1e-4),
    "save_checkpoint": unlike(True, "checkpoints are always saved; see --save_freq and --keep_checkpoints"),
    "save_freq": same("save_freq", 20_000),
    "save_checkpoint_to_hub": unlike(False, "push the export of a run: vlatune export RUN DIR --push_to_hub=NAME"),
    "use_policy_training_preset": left_out("optimizer and schedule are taken from where it says"),
    "rename_map": same("rename_map", {}),
    "eval.": left_out("nothing is simulated while training"),
    "job.": left_out("see job.target"),
    "job.target": unlike(None, "runs are not sent to HF Jobs; start it there, or with RAY_ADDRESS on a cluster"),
    "wandb.": left_out("see wandb.enable"),
    "wandb.enable": same("wandb.enable", False),
    "wandb.project": same("wandb.project", "lerobot"),
    "optimizer": left_out("none beside the policy's preset"),
    "optimizer.type": unlike("adamw", "AdamW is the only optimizer"),
    "optimizer.lr": same("optimizer.lr"),
    "optimizer.betas": same("optimizer.betas"),
    "optimizer.eps": same("optimizer.eps"),
    "optimizer.weight_decay": same("optimizer.weight_decay"),
    "optimizer.grad_clip_norm": same("optimizer.grad_clip_norm"),
    "scheduler": left_out("none: the rate stays what it is"),
    "scheduler.type": unlike("cosine_decay_with_warmup", "the schedule is a warm-up and a cosine"),
    "scheduler.num_warmup_steps": same("scheduler.num_warmup_steps"),
    "scheduler.num_decay_steps": same("scheduler.num_decay_steps"),
    "scheduler.peak_lr": left_out("it is the optimizer's rate"),
    "scheduler.decay_lr": same("scheduler.decay_lr"),
    "peft": left_out("none"),
    "peft.method_type": unlike("LORA", "adapters are LoRA's"),
    "peft.r": same("policy.lora_rank", 16),
    "peft.lora_alpha": same("policy.lora_alpha", None),
    "peft.target_modules": unlike(None, "--policy.train=lora adapts the language model and the expert"),
    "peft.full_training_modules": unlike(None, "--policy.train=lora trains the projections, too"),
    "peft.init_type": unlike(None, "adapters begin as PEFT has it"),
    "policy.type": same("policy.type"),
    "policy.path": same("policy.path"),
    "policy.pretrained_path": same("policy.path"),
    "policy.dtype": same("policy.dtype"),
    "policy.gradient_checkpointing": same("policy.gradient_checkpointing"),
    "policy.compile_model": same("policy.compile"),
    "policy.compile_mode": left_out("layers are compiled one by one"),
    "policy.device": left_out("a worker takes the GPU that is there"),
    "policy.use_amp": unlike(
        False, "give --policy.dtype=bfloat16: frozen weights and computing in bfloat16, what trains in float32"
    ),
    "policy.use_peft": left_out("see peft"),
    "policy.train_expert_only": left_out("--policy.train says what trains"),
    "policy.freeze_vision_encoder": left_out("--policy.train says what trains"),
    **dict.fromkeys(
        ("policy.push_to_hub", "policy.repo_id", "policy.private", "policy.tags", "policy.license"), left_out(ROBOT)
    ),
    "policy.optimizer_lr": same("optimizer.lr"),
    "policy.optimizer_betas": same("optimizer.betas"),
    "policy.optimizer_eps": same("optimizer.eps"),
    "policy.optimizer_weight_decay": same("optimizer.weight_decay"),
    "policy.optimizer_grad_clip_norm": same("optimizer.grad_clip_norm"),
    "policy.scheduler_warmup_steps": same("scheduler.num_warmup_steps"),
    "policy.scheduler_decay_steps": same("scheduler.num_decay_steps"),
    "policy.scheduler_decay_lr": same("scheduler.decay_lr"),
    "policy.": Row(why=BY_THE_BASE),
}
"""The longest name counts: `policy.` is for what no other row has."""


@dataclass(frozen=True)
class Translated:
    values: Mapping[str, Any]
    """Our names, dotted -> values."""
    left_out: Mapping[str, str]
    """Fields that were given and change nothing -> why."""


def translate(given: str, known: Collection[str]) -> Translated:
    """`given` is the path of a train_config.json, or a command; `known` are the names of our flags."""
    return _translate(*_read(given), known)


def _read(given: str) -> tuple[dict[str, Any], set[str], int | None]:
    """Their fields by dotted name, those among them that were typed, and the number of processes."""
    if not given.strip().endswith(".json") or " --" in given:
        return _read_command(given)
    return _read_config(Path(given)), set(), None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_file(path.absolute().parent, path.name), path.name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--from_lerobot={path}: not a train_config.json that can be read ({error})") from None
    if not isinstance(content, dict) or "dataset" not in content:
        raise ValueError(
            f"--from_lerobot={path}: there is no 'dataset' in it; give the train_config.json of a LeRobot run"
        )
    return dict(_flat(content))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in ("rename_map", "dataset.image_transforms.tfs"):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _read_command(text: str) -> tuple[dict[str, Any], set[str], int | None]:
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise ValueError(
            f"--from_lerobot: '{text[:60]}' is no command of a shell ({error}); correct its quotes"
        ) from None
    at = next((number for number, word in enumerate(words) if Path(word.strip("$()")).name in PROGRAMS), None)
    if at is None:
        at = next(
            (number for number, word in enumerate(words) if "lerobot-train" in word or word.endswith(PROGRAMS)), -1
        )
    if at < 0:
        raise ValueError(
            f"--from_lerobot: '{text[:60]}' is neither a file that ends with .json nor a command of lerobot-train; quote the command as one word"
        )
    processes = _pairs([word for word in words[:at] if word.startswith("--") or word.isdigit()])
    typed = _pairs([word for word in words[at + 1 :] if word != ")"])
    path = typed.pop("config_path", None)
    number = next((processes[name[2:]] for name in PROCESSES if name[2:] in processes), None)
    if number is not None and not number.isdecimal():
        raise ValueError(f"--from_lerobot: --num_processes={number}: expected a whole number")
    return (_read_config(Path(path)) if path else {}) | typed, set(typed), None if number is None else int(number)


def _pairs(words: list[str]) -> dict[str, Any]:
    """`--a=b` and `--a b`."""
    found: dict[str, Any] = {}
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = rest.pop() if rest and not rest[-1].startswith("--") else "true"
        found[name] = value
    return found


def _translate(fields: dict[str, Any], typed: set[str], processes: int | None, known: Collection[str]) -> Translated:
    values: dict[str, Any] = {}
    refused: list[str] = []
    harmless: dict[str, str] = {}
    for name, value in (_defaults(fields) | fields).items():
        row = _row(name)
        if row is None:
            hint = did_you_mean(name, ROWS) if len(refused) < MAX_REFUSED else ""
            refused.append(f"{_text(name)}: LeRobot has no such field{hint}")
        elif row.ours is not None:
            refused += _take(name, value, row, known, values)
        elif row.harmless:
            harmless |= {name: row.why} if name in typed else {}
        elif name.startswith("policy.") and row.default is REQUIRED:
            refused += [f"{name}={_text(value)}: {row.why}"] if name in typed else []
        elif not _is_same(value, row.default):
            refused.append(f"{name}={_text(value)}: {row.why}")
    refused += _derive(fields, values, known)
    if refused:
        more = f"; and {len(refused) - MAX_REFUSED:,} more" if len(refused) > MAX_REFUSED else ""
        raise ValueError(
            f"--from_lerobot: there is nothing equivalent to {'; nor to '.join(refused[:MAX_REFUSED])}{more}"
        )
    if processes is not None:
        values["num_workers"] = processes
    return Translated({name: value for name, value in values.items() if value is not None}, harmless)


def _defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """LeRobot's values of what was not given; those of a group that is not used have no part in it."""
    found = {name: row.default for name, row in ROWS.items() if row.ours and row.default is not REQUIRED}
    return (
        found
        if any(name.startswith("peft.") for name in fields)
        else {k: v for k, v in found.items() if not k.startswith("peft.")}
    )


def _row(name: str) -> Row | None:
    if name in ROWS:
        return ROWS[name]
    parts = name.split(".", MAX_PARTS)
    tops = (".".join(parts[:number]) + "." for number in range(len(parts) - 1, 0, -1))
    return next((ROWS[top] for top in tops if top in ROWS), None)


def _take(name: str, value: Any, row: Row, known: Collection[str], values: dict[str, Any]) -> list[str]:
    """Puts the value under our name; says what is wrong where this version has no such flag."""
    assert row.ours is not None
    if row.ours not in known:
        return (
            []
            if _is_same(value, row.default) or row.default is REQUIRED or name == "wandb.project"
            else [f"{name}={_text(value)}: this version has no --{row.ours}"]
        )
    if name == "dataset.root" and value is not None:
        value = [value]
    if not (value is None and values.get(row.ours) is not None):
        values[row.ours] = value
    return []


def _derive(fields: Mapping[str, Any], values: dict[str, Any], known: Collection[str]) -> list[str]:
    """What several fields decide together: who trains, the schedule, names."""
    kind = str(values.get("policy.type") or "")
    if not kind and values.get("policy.path") is None:
        return ["a command without --policy.type and --policy.path"]
    if kind and kind not in policy_types():
        return [f"policy.type={kind}: there are {', '.join(policy_types())}"]
    if values.get("dataset.root") is not None:
        values["dataset.repo_id"] = None
    values["job_name"] = values.get("job_name") or kind or "train"
    if (
        "scheduler" in fields
        and fields["scheduler"] is None
        and not _is_true(fields.get("use_policy_training_preset", True))
    ):
        values |= {"scheduler.num_warmup_steps": 0, "scheduler.decay_lr": values.get("optimizer.lr")}
    if _is_true(fields.get("use_policy_training_preset", True)):
        for name, value in fields.items():
            if name.startswith(("policy.optimizer_", "policy.scheduler_")) and (row := _row(name)) and row.ours:
                values[row.ours] = value
    for name, value in _presets(kind):
        values.setdefault(name, value)
    if values.get("eval_freq") == 0 or "eval_freq" not in known:
        values.pop("eval_samples", None)
    return list(_who_trains(fields, values, kind))


def _presets(kind: str) -> Iterator[tuple[str, Any]]:
    """Optimizer and schedule of a policy where nothing else is said: its recipes have LeRobot's own."""
    recipes = [one for one in get_policy(kind).recipes.values() if not one.small] if kind else []
    for group in ("optimizer", "scheduler") if recipes else ():
        yield from _flat(recipes[0].values.get(group, {}), f"{group}.")


def _who_trains(fields: Mapping[str, Any], values: dict[str, Any], kind: str) -> Iterator[str]:
    adapters = any(name.startswith("peft.") for name in fields)
    expert, tower = (
        _is_true(fields.get(f"policy.{name}", False)) for name in ("train_expert_only", "freeze_vision_encoder")
    )
    way = "lora" if adapters else "expert" if expert else "full"
    if adapters and values.get("policy.lora_alpha") is None:
        values["policy.lora_alpha"] = 8.0  # PEFT's own
    ways = get_policy(kind).train_ways if kind else {way: ""}
    if tower and not (expert or adapters) and "expert" in ways:
        yield "policy.freeze_vision_encoder=true alone: the vision tower is frozen with the language model (--policy.train=expert), or not at all"
    elif way in ways:
        values["policy.train"] = way
    else:
        yield f"training '{way}': {kind} has {', '.join(ways)}"


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _is_same(value: Any, default: Any) -> bool:
    """A value as text or as JSON gives it, against a default."""
    if value == default or (default is None and value in ("null", "None", "")):
        return True
    if default is None or isinstance(default, bool) or not isinstance(value, str):
        return _text(value).lower() == _text(default).lower()
    try:
        return float(value) == float(default)
    except (TypeError, ValueError):
        return value == str(default)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
