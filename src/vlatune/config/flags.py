"""Build a frozen config from flags, a config file and a recipe.

Works for any frozen dataclass whose fields are plain values or frozen dataclasses. In increasing
priority: class defaults, recipe, `--from_lerobot`, `--config_path` file, flags. Files and flags are
flattened to `{"optimizer.lr": Given(...)}`, so merging is a dict union and an invalid value is
reported with its origin. `flag_values.py` parses single values, `fields.py` describes fields,
`help.py` writes `--help`.
"""

import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from vlatune.config.fields import POLICY_OPTIONS, field_types, leaf_types
from vlatune.config.flag_values import RANGE, ExpectationError, convert, is_repeatable, load_yaml, shown
from vlatune.console import warn
from vlatune.errors import did_you_mean
from vlatune.registry import find_recipe, get_policy_info, option_types, policy_types
from vlatune.storage.files import MAX_CONFIG_BYTES, RejectedFileError, read_file


@dataclass(frozen=True)
class Given:
    """A value for one field, and its origin for messages."""

    value: Any
    origin: str


Layer = dict[str, Given]
FROM_LEROBOT = "from_lerobot"


def parse_flags[T](argv: Sequence[str], cls: type[T]) -> T:
    """Return the config for `argv`, which may contain `--recipe=NAME` and `--config_path=FILE`."""
    return parse_command(argv, cls)[0]


def parse_command[T](
    argv: Sequence[str], cls: type[T], *, operands: Sequence[str] = (), usage: str = ""
) -> tuple[T, list[str]]:
    """Return the config and the operands of a command: `eval RUN --seed=1` has the operand RUN.

    The last operand may be repeated if its name ends with dots.
    """
    layer, values = _split_argv(argv, cls)
    if len(values) < len(operands):
        raise ValueError(f"{operands[len(values)].removesuffix('...')} is missing; usage: {usage}")
    if len(values) > len(operands) and not (operands and operands[-1].endswith("...")):
        raise ValueError(f"'{values[len(operands)]}' is not expected here; flags are written --name=value")
    if path := layer.pop("config_path", None):
        layer = _read_file(Path(path.value), cls) | layer
    if lerobot := layer.pop(FROM_LEROBOT, None):
        layer = _lerobot_layer(lerobot.value) | layer
    return _build(cls, _split_workers(layer), base=_recipe_config(cls, layer)), values


def config_from_dict[T](cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Return the config in a nested dict, e.g. a run's config.json; `where` is for messages."""
    return _build(cls, _flatten(cls, values, where))


def flags_of(config: Any) -> list[str]:
    """Return the flags that reproduce a config: its differences from the recipe or the defaults."""
    recipe = getattr(config, "recipe", None)
    words = [f"--recipe={recipe}"] if recipe else []
    given, default = (_values(one) for one in (config, parse_flags(words, type(config))))
    types = leaf_types(type(config))
    for name, value in given.items():
        if name not in default or value != default[name]:
            is_repeated = name in types and is_repeatable(types[name]) and value and isinstance(value[0], str | dict)
            words += [f"--{name}={_as_text(one)}" for one in (value if is_repeated else [value])]
    return words


def quote_flags(words: Iterable[str]) -> str:
    """Quote the words of a command for a shell: --rename_map='{"a": "b"}'."""
    parts = [word.partition("=") for word in words]
    return " ".join(f"{name}={shlex.quote(value)}" if equals else shlex.quote(name) for name, equals, value in parts)


def takes_lerobot(cls: type) -> bool:
    """True if LeRobot's settings can be translated to this config class."""
    return "recipe" in field_types(cls)


def _values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value of every field and of the given policy options."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= _values(value, f"{prefix}{field.name}.")
        elif POLICY_OPTIONS in field.metadata:
            found |= {prefix + name: one for name, one in value.items()}
        else:
            found[prefix + field.name] = value
    return found


def _as_text(value: Any) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value, default=dataclasses.asdict)


def _option_flags(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> type of the options of all policies, if the config class has any."""
    has_options = any(POLICY_OPTIONS in field.metadata for field in dataclasses.fields(cls))
    found = {prefix + name: kind for name, kind in option_types().items()} if has_options else {}
    for name, kind in field_types(cls).items():
        if isinstance(kind, type) and is_dataclass(kind):
            found |= _option_flags(kind, f"{prefix}{name}.")
    return found


def _split_argv(argv: Sequence[str], cls: type) -> tuple[Layer, list[str]]:
    fields = leaf_types(cls)
    known = fields | {"config_path": str} | ({FROM_LEROBOT: str} if takes_lerobot(cls) else {})
    flags: Layer = {}
    values: list[str] = []
    words = list(reversed(argv))
    while words:
        word = words.pop()
        if not word.startswith("--"):
            values.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        if name not in known:
            known = _option_flags(cls) | known
        if name not in known:
            raise ValueError(f"unknown flag --{name}{did_you_mean(name, known, prefix='--')}")
        text = text if equals else _next_value(name, known[name], words)
        if is_repeatable(known[name]) and name in fields:
            texts = [*flags[name].value, text] if name in flags else [text]
            flags[name] = Given(texts, " ".join(f"--{name}={shown(one)}" for one in texts))
        else:
            flags[name] = Given(text, f"--{name}={shown(text)}")
    return flags, values


def _next_value(name: str, kind: Any, words: list[str]) -> str:
    """Return the value after `--name`; a bare boolean flag is true. `words` is in reverse order."""
    following = words[-1] if words else "--"
    if kind is bool and following not in ("true", "false"):
        return "true"
    if following.startswith("--"):
        raise ValueError(f"--{name}: no value given; write --{name}=VALUE")
    return words.pop()


def _read_file(path: Path, cls: type) -> Layer:
    try:
        real = path.resolve()
        text = read_file(real.parent, real.name, max_bytes=MAX_CONFIG_BYTES).decode("utf-8")
        values = json.loads(text) if path.suffix == ".json" else load_yaml(text)
    except OSError as error:
        raise ValueError(f"--config_path={path}: {error.strerror}") from None
    except RejectedFileError as error:
        raise ValueError(f"--config_path={path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config_path={path}: not a YAML or JSON file: {error}") from None
    return _flatten(cls, values, str(path))


def _split_workers(layer: Layer) -> Layer:
    """Replace num_workers=MIN:MAX by its two settings."""
    given = layer.get("num_workers")
    if given is None or ":" not in str(given.value):
        return layer
    span = RANGE.fullmatch(given.value)
    if span is None or not 1 <= int(span[1]) <= int(span[2]):
        raise ValueError(f"{given.origin}: expected MIN:MAX with MIN from 1 to MAX, as 2:8")
    numbers = {"min_workers": span[1], "num_workers": span[2]}
    return layer | {name: Given(number, given.origin) for name, number in numbers.items()}


def _lerobot_layer(given: str) -> Layer:
    from vlatune.config.from_lerobot import translate

    values, ignored = translate(given)
    if ignored:
        warn(f"vlatune: --{FROM_LEROBOT}: ignored, without an effect on what is learned: {', '.join(ignored)}")
    return {name: Given(value, f"--{FROM_LEROBOT}: {name}={shown(value)}") for name, value in values.items()}


def _recipe_config(cls: type, layer: Layer) -> Any:
    """Return the config of the named recipe, else of the recipe named as a from-scratch policy."""
    if "recipe" in layer:
        name = _convert(layer["recipe"], str | None)
        return None if name is None else find_recipe(name).config
    type_name = layer["policy.type"].value if takes_lerobot(cls) and "policy.type" in layer else None
    info = get_policy_info(type_name) if type_name in policy_types() else None
    return info.recipes[info.type].config if info and info.from_scratch and info.type in info.recipes else None


def _flatten(cls: type, values: Any, where: str, prefix: str = "") -> Layer:
    if values in (None, ""):  # an empty section
        return {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: {prefix[:-1] or 'the file'} must be a mapping of names to values")
    types = field_types(cls)
    if any(name not in types for name in values):
        types = {name.removeprefix(prefix): kind for name, kind in _option_flags(cls, prefix).items()} | types
    flat: Layer = {}
    for name, value in values.items():
        if name not in types:
            raise ValueError(
                f"{where}: unknown key {prefix}{shown(name)}{did_you_mean(str(name), types, prefix=prefix)}"
            )
        if is_dataclass(types[name]):
            flat |= _flatten(types[name], value, where, f"{prefix}{name}.")
        else:
            flat[prefix + name] = Given(value, f"{where}: {prefix}{name}={shown(value)}")
    return flat


def _build[T](cls: type[T], layer: Layer, prefix: str = "", base: Any = None) -> T:
    """Return `base`, by default the class defaults, with the values of the layer."""
    values: dict[str, Any] = {} if base is None else vars(base).copy()
    types = field_types(cls)
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        name = prefix + field.name
        if POLICY_OPTIONS in field.metadata:
            values[field.name] = values.get(field.name, {}) | _policy_options(layer, prefix, types, cls(**values))
        elif is_dataclass(types[field.name]):
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            values[field.name] = _build(types[field.name], layer, f"{name}.", values.get(field.name, default))
        elif name in layer:
            values[field.name] = _convert(layer[name], types[field.name])
        elif base is None and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"--{name} is missing")
    return cls(**values)


def _policy_options(layer: Layer, prefix: str, types: Mapping[str, Any], policy: Any) -> dict[str, Any]:
    """Return the values in `layer` that are options of the policy, not fields of its config."""
    found: dict[str, Any] = {}
    for key, given in layer.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and "." not in name and name not in types:
            try:
                info = get_policy_info(policy.type)
                info.option(name)
            except ValueError as error:
                raise ValueError(f"{given.origin}: {error}") from None
            found[name] = _convert(given, get_type_hints(info.options)[name])
    return found


def _convert(given: Given, kind: Any) -> Any:
    try:
        return convert(given.value, kind)
    except ExpectationError as expectation:
        raise ValueError(f"{given.origin}: {expectation}") from None
