"""Allowlists for a policy's processor files and config.json.

LeRobot imports and calls any class that a processor step names. Base models, checkpoints and
exports may therefore only contain the registered steps listed here, with settings of the listed
names and types. Does not import torch, so the driver can check before workers start.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlatune.errors import did_you_mean
from vlatune.storage.limits import limit

CONFIG = "config.json"
PREPROCESSOR, POSTPROCESSOR = PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
RELATIVE_STEP, ABSOLUTE_STEP = "relative_actions_processor", "absolute_actions_processor"
MAX_CHARS, MAX_ITEMS, MAX_NUMBER = 1000, 1000, 1e18
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
STATE_FILE = re.compile(r"policy_(?:pre|post)processor_step_\d{1,3}_\w{1,80}\.safetensors")
"""LeRobot's file names for the tensors of a step."""


def is_hub_name(name: str) -> bool:
    """True for `owner/name`."""
    return HUB_NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Check:
    """A test of a JSON value, and what it expects, for messages."""

    expected: str
    test: Callable[[Any], bool]

    def __call__(self, value: Any) -> bool:
        return self.test(value)


def _list_of(check: Callable[[Any], bool], what: str, *, most: int = MAX_ITEMS) -> Check:
    return Check(what, lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value)))


def _whole(least: int, limit_name: str) -> Check:
    """Return the check of a whole number, which may size a buffer or a loop."""
    text = f"a whole number from {least} to {limit(limit_name):,}"
    return Check(text, lambda one: is_number(one) and least <= one <= limit(limit_name) and one == int(one))


def _is_feature(value: Any) -> bool:
    has_both = isinstance(value, dict) and value.keys() == {"type", "shape"} and is_text(value["type"])
    return has_both and _list_of(is_number, "", most=8)(value["shape"])


def _map_of(check: Callable[[Any], bool], what: str) -> Check:
    return Check(what, lambda value: isinstance(value, dict) and is_texts([*value]) and all(map(check, value.values())))


is_flag = Check("true or false", lambda value: isinstance(value, bool))
is_text = Check("text", lambda value: isinstance(value, str) and len(value) <= MAX_CHARS and value.isprintable())
is_number = Check(
    "a number", lambda value: isinstance(value, int | float) and not is_flag(value) and abs(value) <= MAX_NUMBER
)
is_switch = Check("true or false", lambda value: is_flag(value) or (is_number(value) and value in (0, 1)))
"""A flag that LeRobot's config stores as a number or a bool."""
is_count = _whole(0, "policy_number")
is_size = _whole(1, "policy_number")
is_step_count = _whole(1, "sampling_steps")
is_texts = _list_of(is_text, "a list of text")
is_numbers = _list_of(is_number, "a list of numbers")
is_sides = Check("[height, width]", lambda value: isinstance(value, list) and [*map(is_size, value)] == [True, True])
is_text_map = _map_of(is_text, "a mapping of text to text")
is_features = _map_of(_is_feature, "features with type and shape")
is_plain_map = _map_of(
    lambda one: one is None or is_text(one) or is_number(one) or is_flag(one), "a mapping of names to plain values"
)
Fields = Mapping[str, Check]
CHECKS = {
    "flag": is_flag,
    "switch": is_switch,
    "text": is_text,
    "texts": is_texts,
    "number": is_number,
    "numbers": is_numbers,
    "count": is_count,
    "size": is_size,
    "step_count": is_step_count,
    "sides": is_sides,
    "plain_map": is_plain_map,
}


def make_fields(**names: str) -> Fields:
    """Return the check of each field: `size="horizon n_groups"` checks both with `is_size`."""
    return {name: CHECKS[check] for check, listed in names.items() for name in listed.split()}


NORMALISER: Fields = {
    "eps": is_number,
    "features": is_features,
    "norm_map": is_text_map,
    "normalize_observation_keys": is_texts,
}
STEPS: Mapping[str, Fields] = {
    "rename_observations_processor": {"rename_map": is_text_map},
    "to_batch_processor": {},
    RELATIVE_STEP: {"enabled": is_flag, "exclude_joints": is_texts, "action_names": is_texts},
    ABSOLUTE_STEP: {"enabled": is_flag},
    "normalizer_processor": NORMALISER,
    "unnormalizer_processor": NORMALISER,
    "tokenizer_processor": {
        "tokenizer_name": is_text,
        "max_length": is_count,
        "task_key": is_text,
        "padding_side": is_text,
        "padding": is_text,
        "truncation": is_flag,
    },
    "device_processor": {"device": is_text, "float_dtype": is_text},
}
"""Maps the registry names of LeRobot's shared steps to their settings, which may be null."""

COMMON_CONFIG: Fields = {
    **make_fields(
        text="type device repo_id license pretrained_path pretrained_revision",
        count="n_obs_steps",
        flag="use_amp use_peft push_to_hub private",
        texts="tags",
    ),
    **dict.fromkeys(("input_features", "output_features"), is_features),
    "normalization_mapping": is_text_map,
}
"""Fields of LeRobot's `PreTrainedConfig`, and the normalisation modes."""


@dataclass(frozen=True)
class Schema:
    """Allowed content of the files of one policy type."""

    type: str
    config: Fields
    """Fields of config.json in addition to COMMON_CONFIG; each may be null."""
    steps: Mapping[str, Fields] = field(default_factory=dict)
    """Steps in addition to STEPS, by LeRobot's registry name."""
    newer: Mapping[str, Any] = field(default_factory=dict)
    """Fields that later LeRobot versions add, with the default that matches the behaviour here."""


def plain_processors() -> dict[str, dict[str, Any]]:
    """Return the processor files of a policy without a prompt; dataset fields are still empty."""
    normalise = {"eps": 1e-8, "features": {}, "norm_map": {}}
    before = {
        "rename_observations_processor": {"rename_map": {}},
        "to_batch_processor": {},
        "device_processor": {"device": "cpu", "float_dtype": None},
        "normalizer_processor": normalise,
    }
    after = {"unnormalizer_processor": normalise, "device_processor": {"device": "cpu", "float_dtype": None}}
    return {
        file: {
            "name": file.removesuffix(".json"),
            "steps": [{"registry_name": name, "config": dict(config)} for name, config in steps.items()],
        }
        for file, steps in zip(PROCESSORS, (before, after), strict=True)
    }


def checked_config(content: Any, schema: Schema, where: str) -> dict[str, Any]:
    """Return the known fields of a config.json, validated by type.

    A field of another LeRobot version is dropped if it is off or at its default, and rejected
    otherwise, because the policy was trained with an unsupported setting.
    """
    kind = content.get("type") if isinstance(content, dict) else None
    if kind != schema.type:
        raise ValueError(f"{where}: type is '{str(kind)[:80]}', expected '{schema.type}'; set --policy.type")
    fields = {**COMMON_CONFIG, **schema.config}
    known = {name: value for name, value in content.items() if name in fields}
    for name, value in content.items():
        if name not in fields and value and value != schema.newer.get(name):
            raise ValueError(
                f"{where}: {_shown(name)}={_shown(value)} is not supported for {kind}{did_you_mean(name, fields)}; use a base model "
                f"without it"
            )
    _check_fields(known, fields, f"{where} ({kind})")
    return known


def checked_steps(content: Any, schema: Schema, where: str) -> list[dict[str, Any]]:
    """Return the validated steps of a processor file; raise on anything not listed."""
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list) or len(content["steps"]) > MAX_ITEMS:
        raise ValueError(f"{where} has no list of steps; use a base model with LeRobot's processors")
    _reject_unknown(content, ("name", "steps"), where)
    steps = {**STEPS, **schema.steps}
    return [_checked_step(step, steps, f"{where}, step {number}") for number, step in enumerate(content["steps"])]


def checked_state_files(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the tensor files that validated steps refer to."""
    return [step["state_file"] for step in steps if step.get("state_file")]


def _checked_step(step: Any, steps: Mapping[str, Fields], where: str) -> dict[str, Any]:
    if not isinstance(step, dict):
        raise ValueError(f"{where}: expected an object, found a {type(step).__name__}; download the policy again")
    if "class" in step:
        raise ValueError(
            f"{where} names the class {_shown(step['class'])}, which LeRobot would import and call; only steps with a registry_name are "
            f"allowed: do not use policies from untrusted sources, or save the processors again with LeRobot"
        )
    _reject_unknown(step, ("registry_name", "config", "state_file", "artifacts"), where)
    name, config = step.get("registry_name"), step.get("config")
    if not isinstance(name, str) or name not in steps:
        hint = did_you_mean(name, steps) if isinstance(name, str) else ""
        raise ValueError(f"{where}: unknown step {_shown(name)}{hint or '; supported are ' + ', '.join(steps)}")
    _check_fields({} if config is None else config, steps[name], f"{where} ({name})")
    state_file = step.get("state_file")
    if state_file is not None and not (isinstance(state_file, str) and STATE_FILE.fullmatch(state_file)):
        raise ValueError(f"{where}: invalid state_file {_shown(state_file)}; download the policy again")
    artifacts = step.get("artifacts")  # LeRobot 0.7: maps a setting to the folder that it names
    if artifacts is not None and not (is_text_map(artifacts) and artifacts.items() <= (config or {}).items()):
        raise ValueError(
            f"{where}: artifacts are {_shown(artifacts)}, expected settings of the step's config; download the policy again"
        )
    return {key: value for key, value in step.items() if key != "artifacts"} | {"config": config or {}}


def _check_fields(config: Any, fields: Fields, where: str) -> None:
    if not isinstance(config, dict):
        raise ValueError(f"{where}: config is {_shown(config)}, expected an object; download the policy again")
    _reject_unknown(config, fields, where)
    for name, value in config.items():
        if value is not None and not fields[name](value):
            raise ValueError(
                f"{where}: {name} is {_shown(value)}, expected {fields[name].expected}; download the policy again"
            )


def _reject_unknown(found: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for name in found:
        if name not in known:
            hint = did_you_mean(str(name), known) or f"; supported are {', '.join(known) or 'none'}"
            raise ValueError(f"{where}: unknown setting {_shown(name)}{hint}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
