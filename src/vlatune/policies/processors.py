"""A policy's processor files (policy_preprocessor.json, policy_postprocessor.json) and config.json, as closed lists.

LeRobot imports whatever class a step names and calls it with the step's settings. So a base, a checkpoint and an export
may hold only steps of LeRobot's registry that are listed here, with settings of the listed names and kinds: what a
stranger wrote is neither used nor passed on. No torch: the driver looks before anything is started.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlatune.errors import did_you_mean
from vlatune.limits import limit

CONFIG = "config.json"
PREPROCESSOR, POSTPROCESSOR = PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
RELATIVE_STEP, ABSOLUTE_STEP = "relative_actions_processor", "absolute_actions_processor"
MAX_CHARS, MAX_ITEMS, MAX_NUMBER = 1000, 1000, 1e18
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
STATE_FILE = re.compile(r"policy_(?:pre|post)processor_step_\d{1,3}_\w{1,80}\.safetensors")
"""As LeRobot names the tensors of a step."""


def is_hub_name(name: str) -> bool:
    """`owner/name`, which no path on this machine looks like."""
    return HUB_NAME.fullmatch(name) is not None


def is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_CHARS and value.isprintable()


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def is_count(value: Any) -> bool:
    """A whole number of steps, dims, tokens or pixels: one of 10^9 would be a buffer of that many."""
    return is_number(value) and 0 <= value <= limit("policy_number") and value == int(value)


def is_size(value: Any) -> bool:
    """The same, of which there must be one at least."""
    return is_count(value) and value >= 1


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_switch(value: Any) -> bool:
    """A flag that LeRobot's config has as a number."""
    return is_flag(value) or (is_number(value) and value in (0, 1))


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_ITEMS and all(map(is_text, value))


def is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and is_texts([*value]) and is_texts([*value.values()])


def is_features(value: Any) -> bool:
    """Name -> {"type": ..., "shape": [...]}"""
    return isinstance(value, dict) and is_texts([*value]) and all(map(_feature, value.values()))


def _feature(value: Any) -> bool:
    has_both = isinstance(value, dict) and value.keys() == {"type", "shape"} and is_text(value["type"])
    return (
        has_both
        and isinstance(value["shape"], list)
        and len(value["shape"]) <= 8
        and all(map(is_number, value["shape"]))
    )


def is_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_ITEMS and all(map(is_number, value))


def is_sides(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_count, value)) and min(value) > 0


def is_plain_map(value: Any) -> bool:
    """Name -> text, number, true, false or null"""
    is_map = isinstance(value, dict) and is_texts([*value])
    return is_map and all(one is None or is_text(one) or is_number(one) or is_flag(one) for one in value.values())


Check = Callable[[Any], bool]
Fields = Mapping[str, Check]
KIND: Mapping[Check, str] = {
    is_text: "a text",
    is_number: "a number",
    is_flag: "true or false",
    is_switch: "true or false",
    is_texts: "a list of texts",
    is_text_map: "a mapping of texts to texts",
    is_features: "features with type and shape",
    is_numbers: "a list of numbers",
    is_plain_map: "a mapping of names to plain values",
    is_count: f"a number: a whole one, from 0 to {limit('policy_number'):,}",
    is_size: f"a number: a whole one, from 1 to {limit('policy_number'):,}",
    is_sides: "two numbers: height and width",
}
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
"""LeRobot's registry names of the steps that its policies share -> their settings; each may be null. None takes code."""

COMMON_CONFIG: Fields = {
    **dict.fromkeys(("type", "device", "repo_id", "license", "pretrained_path", "pretrained_revision"), is_text),
    "n_obs_steps": is_count,
    **dict.fromkeys(("use_amp", "use_peft", "push_to_hub", "private"), is_flag),
    "tags": is_texts,
    **dict.fromkeys(("input_features", "output_features"), is_features),
    "normalization_mapping": is_text_map,
}
"""Fields of LeRobot's `PreTrainedConfig`, and how a policy normalises."""


@dataclass(frozen=True)
class Schema:
    """What the files of one kind of policy may hold."""

    type: str
    config: Fields
    """Fields of config.json beside COMMON_CONFIG; each may be null."""
    steps: Mapping[str, Fields] = field(default_factory=dict)
    """Steps of its own beside STEPS, by LeRobot's registry name."""


def plain_processors() -> dict[str, dict[str, Any]]:
    """The processor files of a policy without a prompt, as LeRobot writes them; what the dataset decides is filled in later."""
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
    """The fields of a config.json that its policy's config has, each of its kind; others, of other versions, stay behind."""
    kind = content.get("type") if isinstance(content, dict) else None
    if kind != schema.type:
        raise ValueError(f"{where} says type '{str(kind)[:80]}', expected '{schema.type}'; set --policy.type")
    fields = {**COMMON_CONFIG, **schema.config}
    known = {name: value for name, value in content.items() if name in fields}
    _check_fields(known, fields, f"{where} is not as LeRobot writes it for {kind}")
    return known


def checked_steps(content: Any, schema: Schema, where: str) -> list[dict[str, Any]]:
    """The steps of a processor file, each with `registry_name` and `config`; whatever is not listed is refused."""
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list) or len(content["steps"]) > MAX_ITEMS:
        raise ValueError(f"{where} has no list of steps; use a base that LeRobot's processors were saved with")
    _refuse_unknown(content, ("name", "steps"), where)
    steps = {**STEPS, **schema.steps}
    return [_checked_step(step, steps, f"{where}, step {number}") for number, step in enumerate(content["steps"])]


def checked_state_files(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """Files of tensors that checked steps name."""
    return [step["state_file"] for step in steps if step.get("state_file")]


def _checked_step(step: Any, steps: Mapping[str, Fields], where: str) -> dict[str, Any]:
    if not isinstance(step, dict):
        raise ValueError(f"{where}: expected an object, found a {type(step).__name__}; fetch the policy anew")
    if "class" in step:
        raise ValueError(
            f"{where} names the class {_shown(step['class'])}, which LeRobot would import and call; steps are given by "
            f"registry_name: do not use the policy of somebody you do not trust, or save its processors anew with LeRobot"
        )
    _refuse_unknown(step, ("registry_name", "config", "state_file"), where)
    name, config = step.get("registry_name"), step.get("config")
    if not isinstance(name, str) or name not in steps:
        hint = did_you_mean(name, steps) if isinstance(name, str) else ""
        raise ValueError(f"{where}: the step {_shown(name)} is not known{hint or '; known are ' + ', '.join(steps)}")
    _check_fields({} if config is None else config, steps[name], f"{where} ({name})")
    state_file = step.get("state_file")
    if state_file is not None and not (isinstance(state_file, str) and STATE_FILE.fullmatch(state_file)):
        raise ValueError(
            f"{where}: state_file {_shown(state_file)} is not a name that LeRobot gives; fetch the policy anew"
        )
    return {**step, "config": config or {}}


def _check_fields(config: Any, fields: Fields, where: str) -> None:
    if not isinstance(config, dict):
        raise ValueError(f"{where}: its config is {_shown(config)}, expected an object; fetch the policy anew")
    _refuse_unknown(config, fields, where)
    for name, value in config.items():
        if value is not None and not fields[name](value):
            raise ValueError(
                f"{where}: {name} is {_shown(value)}, expected {KIND[fields[name]]}; fetch the policy anew"
            )


def _refuse_unknown(found: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    odd = [name for name in found if name not in known]
    if odd:
        hint = did_you_mean(str(odd[0]), known) or f"; known are {', '.join(known) or 'none'}"
        raise ValueError(f"{where}: the setting {_shown(odd[0])} is not known{hint}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
