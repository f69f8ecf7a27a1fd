"""A policy's processor files (policy_preprocessor.json, policy_postprocessor.json) and config.json, as closed lists.

LeRobot imports whatever class a step names and calls it with the step's settings. So a base, a checkpoint and an export
may hold only steps of LeRobot's registry that are listed here, with settings of the listed names and kinds: what a
stranger wrote is neither used nor passed on. No torch: the driver looks before anything is started.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vlatune.limits import limit
from vlatune.names import did_you_mean

CONFIG = "config.json"
PREPROCESSOR, POSTPROCESSOR = PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
MAX_CHARS, MAX_ITEMS, MAX_NUMBER = 1000, 1000, 1e18
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
STATE_FILE = re.compile(r"policy_(?:pre|post)processor_step_\d{1,3}_\w{1,80}\.safetensors")
"""As LeRobot names the tensors of a step."""


def is_hub_name(name: str) -> bool:
    """`owner/name`, which no path on this machine looks like."""
    return HUB_NAME.fullmatch(name) is not None


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_CHARS and value.isprintable()


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _count(value: Any) -> bool:
    """A whole number of steps, dims, tokens or pixels: one of 10^9 would be a buffer of that many."""
    return _number(value) and 0 <= value <= limit("policy_number") and value == int(value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_ITEMS and all(map(_text, value))


def _text_map(value: Any) -> bool:
    return isinstance(value, dict) and _texts([*value]) and _texts([*value.values()])


def _features(value: Any) -> bool:
    """Name -> {"type": ..., "shape": [...]}"""
    return isinstance(value, dict) and _texts([*value]) and all(map(_feature, value.values()))


def _feature(value: Any) -> bool:
    has_both = isinstance(value, dict) and value.keys() == {"type", "shape"} and _text(value["type"])
    return (
        has_both and isinstance(value["shape"], list) and len(value["shape"]) <= 8 and all(map(_number, value["shape"]))
    )


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_ITEMS and all(map(_number, value))


def _sides(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_count, value)) and min(value) > 0


def _plain_map(value: Any) -> bool:
    """Name -> text, number, true, false or null"""
    is_map = isinstance(value, dict) and _texts([*value])
    return is_map and all(one is None or _text(one) or _number(one) or _flag(one) for one in value.values())


Fields = Mapping[str, Callable[[Any], bool]]
KIND = {
    _text: "a text",
    _number: "a number",
    _flag: "true or false",
    _texts: "a list of texts",
    _text_map: "a mapping of texts to texts",
    _features: "features with type and shape",
    _numbers: "a list of numbers",
    _plain_map: "a mapping of names to plain values",
    _count: f"a number: a whole one, from 0 to {limit('policy_number'):,}",
    _sides: "two numbers: height and width",
}
NORMALISER: Fields = {
    "eps": _number,
    "features": _features,
    "norm_map": _text_map,
    "normalize_observation_keys": _texts,
}
STEPS: Mapping[str, Fields] = {
    "rename_observations_processor": {"rename_map": _text_map},
    "to_batch_processor": {},
    "relative_actions_processor": {"enabled": _flag, "exclude_joints": _texts, "action_names": _texts},
    "absolute_actions_processor": {"enabled": _flag},
    "normalizer_processor": NORMALISER,
    "unnormalizer_processor": NORMALISER,
    "pi05_prepare_state_tokenizer_processor_step": {"max_state_dim": _count, "task_key": _text},
    "tokenizer_processor": {
        "tokenizer_name": _text,
        "max_length": _count,
        "task_key": _text,
        "padding_side": _text,
        "padding": _text,
        "truncation": _flag,
    },
    "device_processor": {"device": _text, "float_dtype": _text},
}
"""LeRobot's registry names of the steps in PI0.5's pipelines -> their settings; each may be null. None of them takes code."""


CONFIGS: Mapping[str, Fields] = {
    "pi05": {
        **dict.fromkeys(
            ("type", "paligemma_variant", "action_expert_variant", "dtype", "compile_mode", "device", "repo_id"), _text
        ),
        **dict.fromkeys(("license", "pretrained_path", "pretrained_revision"), _text),
        **dict.fromkeys(("n_obs_steps", "chunk_size", "n_action_steps", "max_state_dim", "max_action_dim"), _count),
        **dict.fromkeys(("num_inference_steps", "empty_cameras", "tokenizer_max_length"), _count),
        **dict.fromkeys(("time_sampling_beta_alpha", "time_sampling_beta_beta", "time_sampling_scale"), _number),
        **dict.fromkeys(("time_sampling_offset", "min_period", "max_period"), _number),
        **dict.fromkeys(("optimizer_lr", "optimizer_eps", "optimizer_weight_decay"), _number),
        **dict.fromkeys(("optimizer_grad_clip_norm", "scheduler_warmup_steps", "scheduler_decay_steps"), _number),
        "scheduler_decay_lr": _number,
        **dict.fromkeys(("use_amp", "use_peft", "push_to_hub", "private", "use_relative_actions"), _flag),
        **dict.fromkeys(
            ("gradient_checkpointing", "compile_model", "freeze_vision_encoder", "train_expert_only"), _flag
        ),
        **dict.fromkeys(("tags", "relative_exclude_joints", "action_feature_names"), _texts),
        **dict.fromkeys(("input_features", "output_features"), _features),
        "image_resolution": _sides,
        "optimizer_betas": _numbers,
        "normalization_mapping": _text_map,
        "rtc_config": _plain_map,
    }
}
"""A policy's type -> the fields of LeRobot's config class for it; each may be null."""


def checked_config(content: Any, where: str) -> dict[str, Any]:
    """The fields of a config.json that its policy's config has, each of its kind; others, of other versions, stay behind."""
    kind = content.get("type") if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise ValueError(f"{where}: the policy's type is {_shown(kind)}, expected one of {', '.join(CONFIGS)}")
    known = {name: value for name, value in content.items() if name in CONFIGS[kind]}
    _check_fields(known, CONFIGS[kind], f"{where} is not as LeRobot writes it for {kind}")
    return known


def checked_steps(content: Any, where: str) -> list[dict[str, Any]]:
    """The steps of a processor file, each with `registry_name` and `config`; whatever is not listed is refused."""
    if not isinstance(content, dict) or not isinstance(content.get("steps"), list) or len(content["steps"]) > MAX_ITEMS:
        raise ValueError(f"{where} has no list of steps; use a base that LeRobot's processors were saved with")
    _refuse_unknown(content, ("name", "steps"), where)
    return [_checked_step(step, f"{where}, step {number}") for number, step in enumerate(content["steps"])]


def checked_state_files(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """Files of tensors that checked steps name."""
    return [step["state_file"] for step in steps if step.get("state_file")]


def _checked_step(step: Any, where: str) -> dict[str, Any]:
    if not isinstance(step, dict):
        raise ValueError(f"{where}: expected an object, found a {type(step).__name__}; fetch the policy anew")
    if "class" in step:
        raise ValueError(
            f"{where} names the class {_shown(step['class'])}, which LeRobot would import and call; steps are given by "
            f"registry_name: do not use the policy of somebody you do not trust, or save its processors anew with LeRobot"
        )
    _refuse_unknown(step, ("registry_name", "config", "state_file"), where)
    name, config = step.get("registry_name"), step.get("config")
    if not isinstance(name, str) or name not in STEPS:
        hint = did_you_mean(name, STEPS) if isinstance(name, str) else ""
        raise ValueError(f"{where}: the step {_shown(name)} is not known{hint or '; known are ' + ', '.join(STEPS)}")
    _check_fields({} if config is None else config, STEPS[name], f"{where} ({name})")
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
