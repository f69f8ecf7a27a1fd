"""`--from_lerobot`: a `train_config.json` of LeRobot, or a command line of `lerobot-train`, as settings of our own.

`lerobot_fields.py` has a row for every field: the flag of ours that means the same, the reason why it may be left out, or the reason
why there is nothing like it; then a value other than LeRobot's default is refused. A policy's own fields are those that its card
says a run may set (`Policy.overrides`). What is not given has LeRobot's default, not ours, so that the run is the one that
`lerobot-train` would make.
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
from vlatune.lerobot_fields import (
    OPTIMIZERS,
    PRESETS,
    REQUIRED,
    ROWS,
    WHO_TRAINS,
    Row,
    same,
)
from vlatune.policies.registry import Override, Policy, get_policy, policy_types

PROGRAMS = ("lerobot-train", "lerobot_train", "lerobot_train.py", "train.py", "lerobot.scripts.lerobot_train")
PROCESSES = ("--num_processes", "--num-processes")
MAX_REFUSED, MAX_TEXT, MAX_PARTS = 20, 200, 8
"""Fields that a message names, characters of each, and parts of a name that are looked at: a file may hold a million."""


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
    fields = _of_base(fields) | fields
    card = _card(fields)
    overrides = _overrides(fields, card)
    known = {*known, *overrides}
    fields, unused = _looked_at(fields)
    values: dict[str, Any] = {}
    refused: list[str] = []
    harmless = {name: why for name, why in unused.items() if name in typed}
    new = {f"policy.{name}" for name in card.new_model_fields} if card and not _path(fields) else set()
    given = _defaults(fields, overrides) | fields
    for name in sorted(given, key=lambda name: name == "scheduler.name"):  # it says more than scheduler.type
        value, row = given[name], _row(name, overrides)
        if row is None:
            hint = did_you_mean(name, ROWS) if len(refused) < MAX_REFUSED else ""
            refused.append(f"{_text(name)}: LeRobot has no such field{hint}")
        elif row.ours is not None:
            refused += _take(name, value, row, known, values)
        elif row.harmless:
            harmless |= {name: row.why} if name in typed else {}
        elif name.startswith("policy.") and row.default is REQUIRED:
            hint = did_you_mean(name, overrides) if name in typed and len(refused) < MAX_REFUSED else ""
            refused += [f"{name}={_text(value)}: {row.why}{hint}"] if name in typed and name not in new else []
        elif not _is_same(value, row.default):
            refused.append(f"{name}={_text(value)}: {row.why}")
    refused += _derive(fields, values, harmless, card)
    if refused:
        more = f"; and {len(refused) - MAX_REFUSED:,} more" if len(refused) > MAX_REFUSED else ""
        raise ValueError(
            f"--from_lerobot: there is nothing equivalent to {'; nor to '.join(refused[:MAX_REFUSED])}{more}"
        )
    if processes is not None:
        values["num_workers"] = processes
    kept = {name: value for name, value in values.items() if value is not None or name in overrides}
    return Translated(kept, harmless)


def _path(fields: Mapping[str, Any]) -> str | None:
    """The base that the run begins with."""
    given = (fields.get(f"policy.{name}") for name in ("path", "pretrained_path"))
    return next((str(one) for one in given if one not in (None, "", "null", "None")), None)


def _of_base(fields: Mapping[str, Any]) -> dict[str, Any]:
    """With `--policy.path` LeRobot's policy config is the base's own: its type, presets, and what of it trains.

    Of a folder; one on a hub is not fetched for it. What else is there counts in our runs as well.
    """
    path = str(fields.get("policy.path") or "")
    try:
        folder = Path(path).expanduser()
        if not path or not folder.is_dir():
            return {}
        content = parse_json(read_file(folder.absolute(), "config.json"), "config.json")
    except (OSError, RuntimeError, ValueError) as error:  # also of a name that is too long, or a home that is not known
        said = f"--from_lerobot: policy.path={_text(path)}: its config.json cannot be read"
        raise ValueError(f"{said} ({_text(str(error))})") from None
    found = {f"policy.{key}": value for key, value in content.items()} if isinstance(content, dict) else {}
    return {key: value for key, value in found.items() if key in ("policy.type", *WHO_TRAINS, *PRESETS)}


def _card(fields: Mapping[str, Any]) -> Policy | None:
    """Of the type that is named, or of the hub repository that everybody starts from."""
    kind, path = fields.get("policy.type"), _path(fields)
    if kind:
        return get_policy(kind) if kind in policy_types() else None
    return next((card for card in map(get_policy, policy_types()) if path and card.hub_base == path), None)


def _overrides(fields: Mapping[str, Any], card: Policy | None) -> dict[str, Override]:
    """Flag -> those that the run may set, by their dotted names; some say only how a new model is made."""
    of_card = card.overrides.items() if card else ()
    return {f"policy.{name}": one for name, one in of_card if one.with_base != "unused" or not _path(fields)}


def _looked_at(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """LeRobot looks at the policy's presets or at optimizer and scheduler, not at both; the others, and why not."""
    preset = _has_preset(fields)
    why = f"use_policy_training_preset is {'on' if preset else 'off'}"
    names = (name for name in fields if (name.startswith(("optimizer.", "scheduler.")) if preset else name in PRESETS))
    unused = dict.fromkeys(names, why)
    return {name: value for name, value in fields.items() if name not in unused}, unused


def _has_preset(fields: Mapping[str, Any]) -> bool:
    return _is_true(fields.get("use_policy_training_preset", True))


def _defaults(fields: Mapping[str, Any], overrides: Mapping[str, Override]) -> dict[str, Any]:
    """LeRobot's values of what was not given; those of a group that is not used have no part in it, and a base has its own."""
    found = {name: row.default for name, row in ROWS.items() if row.ours and row.default is not REQUIRED}
    if not any(name.startswith("peft.") for name in fields):
        found = {name: value for name, value in found.items() if not name.startswith("peft.")}
    return found if _path(fields) else found | {name: one.default for name, one in overrides.items()}


def _row(name: str, overrides: Collection[str] = ()) -> Row | None:
    if name in overrides:
        return same(name)
    if name in ROWS:
        return ROWS[name]
    parts = name.split(".", MAX_PARTS)
    tops = (".".join(parts[:number]) + "." for number in range(len(parts) - 1, 0, -1))
    return next((ROWS[top] for top in tops if top in ROWS), None)


def _take(name: str, value: Any, row: Row, known: Collection[str], values: dict[str, Any]) -> list[str]:
    """Puts the value under our name; says what is wrong where there is no such value, or this version has no such flag."""
    assert row.ours is not None
    if row.ours not in known:
        return (
            []
            if _is_same(value, row.default) or row.default is REQUIRED or name == "wandb.project"
            else [f"{name}={_text(value)}: this version has no --{row.ours}"]
        )
    if row.values is not None and value is not None:
        if str(value) not in row.values:
            return [f"{name}={_text(value)}: {row.why}"]
        value = row.values[str(value)]
    if name == "dataset.root" and value is not None:
        value = [value]
    if not (value is None and values.get(row.ours) is not None):
        values[row.ours] = value
    return []


def _derive(
    fields: Mapping[str, Any], values: dict[str, Any], harmless: dict[str, str], card: Policy | None
) -> Iterator[str]:
    """What several fields decide together: who trains, optimizer and schedule, names. Yields what has no equivalent."""
    kind, path = fields.get("policy.type"), _path(fields)
    if card is None:
        yield _no_policy(kind, path)
        return
    values["policy.type"] = card.type
    if values.get("dataset.root") is not None:
        values["dataset.repo_id"] = None
    values["job_name"] = values.get("job_name") or card.type
    yield from _optimizer(fields, values, card)
    if _is_same(values.get("eval_samples"), 0):  # LeRobot's word for all
        del values["eval_samples"]
        if not _is_same(values.get("eval_freq"), 0):
            harmless["max_eval_samples"] = "a validation looks at --eval_samples held-out samples, spread evenly"
    yield from _who_trains(fields, values, card)
    for name, (theirs, ours) in card.new_model_fields.items() if not path else ():
        value = fields.get(f"policy.{name}", theirs)
        if name not in card.overrides and not _is_same(value, ours):
            yield f"policy.{name}={_text(value)}: a new {card.title} has {_text(ours)} here; say so, or give a base with --policy.path"


def _no_policy(kind: Any, path: str | None) -> str:
    if kind:
        return f"policy.type={_text(kind)}: there are {', '.join(policy_types())}"
    if path is None:
        return "a command without --policy.type and --policy.path"
    return (
        f"policy.path={_text(path)} alone: it is not fetched to look of what type it is; add --policy.type=TYPE to it"
    )


def _optimizer(fields: Mapping[str, Any], values: dict[str, Any], card: Policy) -> Iterator[str]:
    """What of optimizer and schedule was not said."""
    if _has_preset(fields):
        for name, value in _presets(card):
            values.setdefault(name, value)
        return
    usual = OPTIMIZERS.get(values.get("optimizer.type", ""))
    if usual is None and "optimizer.type" not in fields:
        yield "use_policy_training_preset=false without an optimizer.type, which LeRobot asks for"
    for name, value in (usual or {}).items():
        values.setdefault(f"optimizer.{name}", value)
    if "scheduler.type" not in fields:
        values["scheduler.type"] = "none"


def _presets(card: Policy) -> Iterator[tuple[str, Any]]:
    """Optimizer and schedule of a policy where nothing else is said: its recipes have LeRobot's own."""
    recipes = [one for one in card.recipes.values() if not one.small]
    for group in ("optimizer", "scheduler") if recipes else ():
        yield from _flat(recipes[0].values.get(group, {}), f"{group}.")


def _who_trains(fields: Mapping[str, Any], values: dict[str, Any], card: Policy) -> Iterator[str]:
    adapters = any(name.startswith("peft.") for name in fields)
    usual = card.frozen_fields
    expert, tower = (_is_true(fields.get(name, usual.get(name.removeprefix("policy."), False))) for name in WHO_TRAINS)
    way = "lora" if adapters else "expert" if expert else "language" if tower else "full"
    if adapters and values.get("policy.lora_alpha") is None:
        values["policy.lora_alpha"] = 8.0  # PEFT's own
    if way in card.train_ways:
        values["policy.train"] = way
    elif way == "language":
        yield "policy.freeze_vision_encoder=true alone: the vision tower is frozen with the language model (--policy.train=expert), or not at all"
    else:
        yield f"training '{way}': {card.type} has {', '.join(card.train_ways)}"


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
