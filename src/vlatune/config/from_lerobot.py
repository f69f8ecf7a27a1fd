"""`--from_lerobot`: translate LeRobot's `train_config.json` or a `lerobot-train` command.

`lerobot_fields.py` has a row for every field. Fields that are not given have
LeRobot's defaults, so that the run has `lerobot-train`'s settings. LeRobot is not imported.
"""

import dataclasses
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlatune.config.lerobot_fields import FROZEN, OPTIMIZERS, PRESETS, REQUIRED, ROWS, Row
from vlatune.errors import did_you_mean
from vlatune.registry import PolicyInfo, get_policy_info, policy_types
from vlatune.storage.files import parse_json, read_file

PROGRAMS = ("lerobot-train", "lerobot_train", "lerobot_train.py", "train.py", "lerobot.scripts.lerobot_train")
FLAG = re.compile(r"--|-[A-Za-z]|\$\(|`")
OPERATORS = ";<>|&\n"
"""Shell characters that end or redirect a command."""
MAX_REJECTED, MAX_TEXT, MAX_PARTS = 20, 200, 8
"""Limits of a message: fields named, characters of each; and parts of a dotted name."""
NULLS = (None, "", "null", "None")


def translate(given: str) -> tuple[dict[str, Any], list[str]]:
    """Translate a train_config.json (path) or a command.

    Returns flag -> value, and the given fields that have no effect. Raises a ValueError that names
    every field without an equivalent.
    """
    if given.strip().endswith(".json") and " --" not in given:
        return _Translation(_read_config(Path(given)), {}, {}).run()
    words = _split_command(given)
    at = next((number for number, word in enumerate(words) if Path(word.strip("$()`")).name in PROGRAMS), None)
    if at is None:
        raise ValueError(
            f"--from_lerobot: '{given[:60]}' is neither a .json file nor a lerobot-train command; quote the command as one word"
        )
    launcher = {word.partition("=")[0]: word for word in words[:at] if re.match(r"[A-Za-z_]\w*=", word)}
    launcher |= {f"--{name.replace('-', '_')}": value for name, value in _parse_flags(words[:at]).items()}
    typed = _parse_flags([word for word in words[at + 1 :] if word != ")"], strict=True)
    path = typed.pop("config_path", None)
    return _Translation(_read_config(Path(path)) if path else {}, typed, launcher).run()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_file(path.absolute().parent, path.name), path.name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--from_lerobot={path}: not a readable train_config.json ({error})") from None
    if not isinstance(content, dict) or "dataset" not in content:
        raise ValueError(f"--from_lerobot={path}: has no 'dataset'; give the train_config.json of a LeRobot run")
    return dict(_flatten(content))


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in ("rename_map", "dataset.image_transforms.tfs"):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _split_command(text: str) -> list[str]:
    """Split one shell command; a second command, a pipe or a redirection is rejected."""
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    lexer = shlex.shlex(text.strip(), posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise ValueError(f"--from_lerobot: '{text[:60]}' is not a shell command ({error}); check its quotes") from None
    for word in words:
        if word and not word.strip(OPERATORS):
            raise ValueError(
                f"--from_lerobot: give one lerobot-train command: {json.dumps(word)} starts a second one or redirects it; remove "
                f"everything else (join the lines of a command with a backslash)"
            )
    return words


def _parse_flags(words: list[str], *, strict: bool = False) -> dict[str, Any]:
    """Parse `--a=b` and `--a b`; if `strict`, words that belong to no flag are rejected."""
    found: dict[str, Any] = {}
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else rest.pop() if rest and not FLAG.match(rest[-1]) else "true"
        elif strict:
            raise ValueError(f"--from_lerobot: '{_text(word)}' belongs to no flag; write flags as --name=value")
    return found


class _Translation:
    """One translation: collects values, ignored fields and rejected fields."""

    def __init__(self, stored: dict[str, Any], typed: dict[str, Any], launcher: dict[str, str]) -> None:
        """Start from the fields of a file, those on the command line, and launcher flags."""
        given = stored | typed
        self.typed, self.launcher = typed, launcher
        self.fields = _base_fields(str(given.get("policy.path") or "")) | given
        paths = (self.fields.get(f"policy.{name}") for name in ("path", "pretrained_path"))
        self.base = next((str(path) for path in paths if path not in NULLS), None)
        self.info = _find_policy(self.fields.get("policy.type"), self.base)
        self.has_preset = _is_true(self.fields.get("use_policy_training_preset", True))
        self.has_adapters = any(name.startswith("peft.") for name in self.fields)
        self.values: dict[str, Any] = {}
        self.ignored: list[str] = []
        self.rejected: list[str] = []

    def run(self) -> tuple[dict[str, Any], list[str]]:
        is_used = {one.name: one.metadata["with_base"] != "unused" for one in dataclasses.fields(self.info.options)}
        defaults = self.info.option_defaults  # some options only apply to new models
        options = {f"policy.{name}": one for name, one in defaults.items() if is_used[name] or self.base is None}
        self._drop_unused_presets()
        self._translate_fields(options)
        self._set_policy()
        self._set_optimizer()
        self._set_validation()
        self._set_precision("accelerator.mixed_precision", str(self.fields.get("accelerator.mixed_precision", "no")))
        self._translate_launcher()
        if self.rejected:
            more = f"; and {len(self.rejected) - MAX_REJECTED:,} more" if len(self.rejected) > MAX_REJECTED else ""
            raise ValueError(f"--from_lerobot: no equivalent for {'; '.join(self.rejected[:MAX_REJECTED])}{more}")
        kept = {name: value for name, value in self.values.items() if value is not None or name in options}
        return kept, self.ignored

    def _reject(self, name: str, value: Any, reason: str) -> None:
        self.rejected.append(f"{name}={_text(value)}: {reason}")

    def _drop_unused_presets(self) -> None:
        """Drop the fields that LeRobot ignores: it uses the policy's presets or the groups."""
        for name in list(self.fields):
            if name.startswith(("optimizer.", "scheduler.")) if self.has_preset else name in PRESETS:
                del self.fields[name]
                self.ignored += [name] if name in self.typed else []

    def _translate_fields(self, options: dict[str, Any]) -> None:
        defaults = {
            name: row.default
            for name, row in ROWS.items()
            if row.flag and row.default is not REQUIRED and (self.has_adapters or not name.startswith("peft."))
        }
        fields = defaults | (options if self.base is None else {}) | self.fields
        new = {f"policy.{name}" for name in self.info.new_model_fields} if self.base is None else set()
        for name in sorted(fields, key=lambda name: name == "scheduler.name"):  # overrides scheduler.type
            value, is_typed = fields[name], name in self.typed
            row = Row(flag=name) if name in options else _find_row(name)
            if row is None:
                hint = did_you_mean(name, ROWS) if len(self.rejected) < MAX_REJECTED else ""
                self.rejected.append(f"{_text(name)}: LeRobot has no such field{hint}")
            elif row.flag:
                self._take(name, value, row, row.flag)
            elif not row.reason:
                self.ignored += [name] if is_typed else []
            elif row.default is not REQUIRED:
                if not _is_same(value, row.default):
                    self._reject(name, value, row.reason)
            elif is_typed and name not in new:
                hint = did_you_mean(name, options) if len(self.rejected) < MAX_REJECTED else ""
                self._reject(name, value, f"{row.reason}{hint}")

    def _take(self, name: str, value: Any, row: Row, flag: str) -> None:
        if row.values is not None and value is not None:
            if str(value) not in row.values:
                return self._reject(name, value, row.reason)
            value = row.values[str(value)]
        if name == "dataset.root" and value is not None:
            value = [value]
        if value is not None or self.values.get(flag) is None:
            self.values[flag] = value
        return None

    def _set_policy(self) -> None:
        """Set type, job name and fine-tuning mode; reject what a new model has differently."""
        info = self.info
        self.values["policy.type"] = info.type
        self.values["job_name"] = self.values.get("job_name") or info.type
        expert, tower = (_is_true(self.fields.get(f"policy.{name}", name in info.frozen_fields)) for name in FROZEN)
        mode = "lora" if self.has_adapters else "expert" if expert else "language" if tower else "full"
        if self.has_adapters and self.values.get("policy.lora_alpha") is None:
            self.values["policy.lora_alpha"] = 8.0  # PEFT's default
        if mode in info.train_modes:
            self.values["policy.train"] = mode
        elif mode == "language":
            reason = "the vision tower is only frozen together with the language model (--policy.train=expert)"
            self._reject(f"policy.{FROZEN[1]}", True, reason)
        else:
            self._reject("--policy.train", mode, f"must be one of {', '.join(info.train_modes)}")
        for name, (default, ours) in info.new_model_fields.items() if self.base is None else ():
            value = self.fields.get(f"policy.{name}", default)
            if name not in info.option_defaults and not _is_same(value, ours):
                reason = f"must be {_text(ours)} for a new {info.title}, or use a base model (--policy.path)"
                self._reject(f"policy.{name}", value, reason)

    def _set_optimizer(self) -> None:
        """Set the optimizer and scheduler values that are not given."""
        values, decay = self.values, self.values.pop("optimizer.ema_decay", None)
        if _is_true(self.fields.get("ema.enable", False)):
            values["optimizer.ema_decay"] = decay
            if decay in NULLS:
                self._reject("ema.enable", True, "only a constant decay is supported; add --ema.decay=0.999")
        if self.has_preset:
            presets = next((one.config for one in self.info.recipes.values() if not one.small), None)
            for group in ("optimizer", "scheduler") if presets else ():
                for name, value in dataclasses.asdict(getattr(presets, group)).items():
                    values.setdefault(f"{group}.{name}", value)
            return
        if "optimizer.type" not in self.fields:
            self._reject("use_policy_training_preset", False, "LeRobot requires an optimizer.type with it")
        for name, value in OPTIMIZERS.get(values.get("optimizer.type", ""), {}).items():
            values.setdefault(f"optimizer.{name}", value)
        if "scheduler.type" not in self.fields:
            values["scheduler.type"] = "none"
        given = (values.get("optimizer.lr"), self.fields.get("scheduler.peak_lr"), values.get("scheduler.decay_lr"))
        try:
            lr, peak, final = (float(one) for one in given)  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError):  # missing, or invalid, which the check of the flag reports
            return
        if peak != lr and peak > 0:  # LeRobot scales optimizer.lr by a factor that ends at decay_lr / peak_lr
            values["scheduler.decay_lr"] = final * lr / peak

    def _set_validation(self) -> None:
        if self.values.get("dataset.root") is not None:
            self.values["dataset.repo_id"] = None
        if not _is_same(self.values.get("dataset.eval_split"), 0):
            self.values["dataset.hold_out"] = "last_of_task"
        if _is_same(self.values.get("eval_samples"), 0):  # means all samples in LeRobot
            del self.values["eval_samples"]

    def _translate_launcher(self) -> None:
        """Translate processes and precision; other launcher flags and the environment are ignored."""
        names = ("--num_processes", "--nproc_per_node", "--nnodes")
        counts = {name: self.launcher.pop(name) for name in names if name in self.launcher}
        for name, value in counts.items():
            if not value.isdecimal():
                raise ValueError(f"--from_lerobot: {name}={_text(value)}: expected a whole number")
        if counts.keys() - {"--nnodes"}:
            self.values["num_workers"] = math.prod(map(int, counts.values()))
        self._set_precision("--mixed_precision", self.launcher.pop("--mixed_precision", "no"))
        if file := self.launcher.pop("--config_file", None):
            reason = "launcher files are not read; give its num_processes and mixed_precision as flags"
            self._reject("--config_file", file, reason)
        self.ignored += sorted(self.launcher)

    def _set_precision(self, name: str, value: str) -> None:
        """Translate autocast to --policy.dtype."""
        if value not in ("bf16", "no"):
            self._reject(name, value, "supported are bf16 and no")
        elif value == "bf16" and "dtype" not in self.info.settings:
            self._reject(name, value, f"{self.info.title} computes in float32; remove it")
        elif value == "bf16" and not (name == "--mixed_precision" and self.fields.get("policy.dtype")):
            self.values["policy.dtype"] = "bfloat16"


def _find_policy(kind: Any, base: str | None) -> PolicyInfo:
    """Return the policy of the given type, or the one whose default hub base is given."""
    if kind in policy_types():
        return get_policy_info(kind)
    if kind:
        reason = f"policy.type={_text(kind)}: must be one of {', '.join(policy_types())}"
    elif base is None:
        reason = "a command without --policy.type and --policy.path"
    else:
        for info in map(get_policy_info, policy_types()):
            if info.hub_base == base:
                return info
        reason = f"policy.path={_text(base)}: the type of this policy is not known; add --policy.type=TYPE"
    raise ValueError(f"--from_lerobot: no equivalent for {reason}")


def _base_fields(path: str) -> dict[str, Any]:
    """Return the fields that LeRobot reads from the config.json of a base model's folder.

    Hub repositories are not downloaded. Other fields are read from the base model by our runs, too.
    """
    try:
        folder = Path(path).expanduser()
        if not path or not folder.is_dir():
            return {}
        content = parse_json(read_file(folder.absolute(), "config.json"), "config.json")
    except (OSError, RuntimeError, ValueError) as error:  # also a name that is too long, an unknown home directory
        raise ValueError(
            f"--from_lerobot: policy.path={_text(path)}: cannot read config.json ({_text(str(error))})"
        ) from None
    found = {f"policy.{key}": value for key, value in content.items()} if isinstance(content, dict) else {}
    kept = ("policy.type", *(f"policy.{name}" for name in FROZEN), *PRESETS)
    return {key: value for key, value in found.items() if key in kept}


def _find_row(name: str) -> Row | None:
    """Return the row of a field, else of the longest prefix that has one."""
    if name in ROWS:
        return ROWS[name]
    parts = name.split(".", MAX_PARTS)
    prefixes = (".".join(parts[:number]) + "." for number in range(len(parts) - 1, 0, -1))
    return next((ROWS[prefix] for prefix in prefixes if prefix in ROWS), None)


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _is_same(value: Any, default: Any) -> bool:
    """True if a value, given as text or JSON, equals a default."""
    if value == default or (default is None and value in NULLS):
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
