"""Flags, a file and a recipe become one frozen config.

Works for any frozen dataclass whose fields are plain values or further frozen dataclasses. Four layers, each over
the one before: the class's defaults, the recipe, the file of `--config_path`, the flags. Every layer is flattened to
`{"optimizer.lr": Given(...)}`, so that laying one over another is a dict union, and a value that does not fit its
field is reported where it was given. `flag_values.py` reads single values. The help of a command is made from its config
class, too: flag, type, default, and the sentence under the field.
"""

import ast
import dataclasses
import inspect
import json
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from vlatune.console import warn
from vlatune.errors import did_you_mean
from vlatune.files import RefusedFileError, read_file
from vlatune.flag_values import ExpectationError, OpenNames, convert, is_repeatable, kind_name, load_yaml, shown
from vlatune.recipes import get_recipe, recipe_of_type


@dataclass(frozen=True)
class Given:
    """A value for one field, and where it came from."""

    value: Any
    place: str


Layer = dict[str, Given]
FROM_LEROBOT = "from_lerobot"
LEROBOT_HELP = "LeRobot's train_config.json, or a command of lerobot-train in quotes: the same run, or what of it has no equivalent."


class MissingOperandError(ValueError):
    """The command line lacks an operand."""


def parse_flags[T](argv: Sequence[str], cls: type[T]) -> T:
    """The config that `argv` describes: `--a.b=value` or `--a.b value`, `--recipe=NAME`, `--config_path=FILE`."""
    return parse_command(argv, cls)[0]


def parse_command[T](argv: Sequence[str], cls: type[T], *, operands: Sequence[str] = ()) -> tuple[T, list[str]]:
    """The config, and the values of a command's operands: `eval RUN --seed=1` has the operand RUN.

    The last operand may be given several times if its name ends with dots.
    """
    flags, values = _split_argv(argv, cls)
    if len(values) < len(operands):
        raise MissingOperandError(f"{operands[len(values)].removesuffix('...')} is missing")
    if len(values) > len(operands) and not (operands and operands[-1].endswith("...")):
        raise ValueError(f"'{values[len(operands)]}' is not expected here; flags are written --name=value")
    path, theirs = flags.pop("config_path", None), flags.pop(FROM_LEROBOT, None)
    file_layer = _read_file(Path(path.value), cls) if path else {}
    if theirs:
        file_layer = _lerobot_layer(theirs.value, cls) | file_layer
    return _build(cls, _recipe_layer(cls, file_layer | flags) | file_layer | flags), values


def config_from_dict[T](cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """The config in a nested dict, for example a run's config.json; `where` names its origin in errors."""
    return _build(cls, _flatten(cls, values, where))


def flags_of(config: Any) -> list[str]:
    """The flags that give a config, each a word of its own: what differs from its recipe, or from the defaults without one."""
    cls, words = type(config), []
    recipe = getattr(config, "recipe", None)
    plain = parse_flags([f"--recipe={recipe}"] if recipe else [], cls)
    for name, kind in leaf_types(cls).items():
        value, default = (_leaf(one, name) for one in (config, plain))
        if value != default or (name == "recipe" and recipe):
            again = is_repeatable(kind) and value and isinstance(value[0], str | dict)
            words += [f"--{name}={_as_text(one)}" for one in (value if again else [value])]
    usual = _open_values(plain)
    given = {name: value for name, value in _open_values(config).items() if (name, value) not in usual.items()}
    return words + [f"--{name}={_as_text(value)}" for name, value in given.items()]


def typed(words: Iterable[str]) -> str:
    """Words of a command as a person types them: --rename_map='{"a": "b"}'."""
    parts = [word.partition("=") for word in words]
    return " ".join(f"{name}={shlex.quote(value)}" if equals else shlex.quote(name) for name, equals, value in parts)


def _open_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value of what was given of the flags that are no fields."""
    own = _open_field(type(config))
    found = {prefix + name: value for name, value in getattr(config, own[0]).items()} if own else {}
    for name, kind in _field_types(type(config)).items():
        found |= _open_values(getattr(config, name), f"{prefix}{name}.") if is_config(kind) else {}
    return found


def _leaf(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _as_text(value: Any) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value, default=dataclasses.asdict)


def leaf_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every field, those of nested dataclasses included."""
    found: dict[str, Any] = {}
    for name, kind in _field_types(cls).items():
        found |= leaf_types(kind, f"{prefix}{name}.") if is_config(kind) else {prefix + name: kind}
    return found


def is_config(kind: Any) -> bool:
    """Whether a field's type is a dataclass, whose fields have flags of their own."""
    return dataclasses.is_dataclass(kind)


def _field_types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if OPEN not in field.metadata}


OPEN = "open"
"""Metadata of a dict field that holds further flags: `OpenNames`."""


def _open_field(cls: type) -> tuple[str, OpenNames] | None:
    return next(((one.name, one.metadata[OPEN]) for one in dataclasses.fields(cls) if OPEN in one.metadata), None)


def _open_names(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every flag that is no field."""
    own = _open_field(cls)
    found = {prefix + name: kind for name, kind in own[1].names().items()} if own else {}
    for name, kind in _field_types(cls).items():
        found |= _open_names(kind, f"{prefix}{name}.") if is_config(kind) else {}
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
            known = _open_names(cls) | known
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
    """The word after `--name`; a bare `--resume` means true. `words` is reversed: its last is the next."""
    following = words[-1] if words else "--"
    if kind is bool and following not in ("true", "false"):
        return "true"
    if following.startswith("--"):
        raise ValueError(f"--{name}: no value given; write --{name}=VALUE")
    return words.pop()


def _read_file(path: Path, cls: type) -> Layer:
    try:
        real = path.resolve()
        text = read_file(real.parent, real.name).decode("utf-8")
        values = json.loads(text) if path.suffix == ".json" else load_yaml(text)
    except OSError as error:
        raise ValueError(f"--config_path={path}: {error.strerror}") from None
    except RefusedFileError as error:
        raise ValueError(f"--config_path={path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config_path={path}: not a YAML or JSON file: {error}") from None
    return _flatten(cls, values, str(path))


def takes_lerobot(cls: type) -> bool:
    """Whether a config is that of a run, which LeRobot's settings can be translated to."""
    return "recipe" in _field_types(cls)


def _lerobot_layer(given: str, cls: type) -> Layer:
    from vlatune.from_lerobot import translate

    found = translate(given, leaf_types(cls))
    if found.left_out:
        warn(f"vlatune: --{FROM_LEROBOT}: left out: {'; '.join(f'{k} ({why})' for k, why in found.left_out.items())}")
    return {name: Given(value, f"--{FROM_LEROBOT}: {name}={shown(value)}") for name, value in found.values.items()}


def _recipe_layer(cls: type, given: Layer) -> Layer:
    """Of the recipe that is named, else of the one that goes along with the policy's type."""
    if "recipe" in given:
        name = _checked(given["recipe"], str | None)
    else:
        type_name = given["policy.type"].value if "recipe" in _field_types(cls) and "policy.type" in given else None
        name = recipe_of_type(type_name) if isinstance(type_name, str) else None
    return {} if name is None else _flatten(cls, get_recipe(name), f"recipe {name}")


def _flatten(cls: type, values: Any, where: str, prefix: str = "") -> Layer:
    if values in (None, ""):  # a heading with nothing under it
        return {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: {prefix[:-1] or 'the file'} must be a mapping of names to values")
    types = _field_types(cls)
    if any(name not in types for name in values) and (own := _open_field(cls)):
        types = {**own[1].names(), **types}
    flat: Layer = {}
    for name, value in values.items():
        if name not in types:
            raise ValueError(
                f"{where}: unknown key {prefix}{shown(name)}{did_you_mean(str(name), types, prefix=prefix)}"
            )
        if is_config(types[name]):
            flat |= _flatten(types[name], value, where, f"{prefix}{name}.")
        else:
            flat[prefix + name] = Given(value, f"{where}: {prefix}{name}={shown(value)}")
    return flat


def _build[T](cls: type[T], layer: Layer, prefix: str = "", base: T | None = None) -> T:
    values = {} if base is None else vars(base).copy()
    types = _field_types(cls)
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        if field.name not in types:
            continue
        kind, name = types[field.name], prefix + field.name
        if is_config(kind):
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            values[field.name] = _build(kind, layer, f"{name}.", values.get(field.name, default))
        elif name in layer:
            values[field.name] = _checked(layer[name], kind)
        elif base is None and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"--{name} is missing")
    if own := _open_field(cls):
        values[own[0]] = values.get(own[0], {}) | _build_open(own[1], layer, prefix, types, cls(**values))
    return cls(**values)


def _build_open(own: OpenNames, layer: Layer, prefix: str, types: Mapping[str, Any], built: Any) -> dict[str, Any]:
    """What `layer` has for a class beside its fields."""
    found: dict[str, Any] = {}
    for key, given in layer.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and "." not in name and name not in types:
            try:
                kind = own.kind_of(vars(built), name)
            except ValueError as refusal:
                raise ValueError(f"{given.place}: {refusal}") from None
            found[name] = _checked(given, kind)
    return found


def _checked(given: Given, kind: Any) -> Any:
    try:
        return convert(given.value, kind)
    except ExpectationError as expectation:
        raise ValueError(f"{given.place}: {expectation}") from None


FLAG_COLUMN = 34
"""Where the sentences begin; a longer flag has its sentence below it."""


def help_text(cls: type, *, width: int | None = None) -> str:
    """Every flag of `cls`, its own first, then a group for each nested dataclass."""
    width = width or _terminal_width()
    groups: dict[str, list[str]] = {"": []}
    for name, sentence, default in _rows(cls):
        group = name.rpartition(".")[0]
        flag = f"--{name}={kind_name(leaf_types(cls)[name])}"
        groups.setdefault(group, []).append(_entry(flag, f"{sentence} {_default(default)}".strip(), width))
    groups[""].append(_entry("--config_path=FILE", "YAML or JSON with the same names; flags win over it.", width))
    if takes_lerobot(cls):
        groups[""].append(_entry(f"--{FROM_LEROBOT}=FILE_OR_COMMAND", LEROBOT_HELP, width))
    return "\n\n".join("\n".join([f"{group or 'flags'}:", *lines]) for group, lines in groups.items())


def flag_lines(rows: Mapping[str, tuple[Any, str, Any]], *, width: int | None = None) -> str:
    """Flags as in `help_text`: name -> (type, sentence, default)."""
    texts = {
        f"--{name}={kind_name(kind)}": f"{text} {_default(default)}" for name, (kind, text, default) in rows.items()
    }
    return "\n".join(_entry(flag, text.strip(), width or _terminal_width()) for flag, text in texts.items())


def table(rows: Mapping[str, str], *, width: int | None = None) -> str:
    """Names and what they mean, in two columns."""
    column = max(map(len, rows)) + 4
    return "\n".join(_entry(name, meaning, width or _terminal_width(), column) for name, meaning in rows.items())


def _terminal_width() -> int:
    return min(shutil.get_terminal_size().columns, 120)


def _rows(cls: type, prefix: str = "", base: Any = None) -> list[tuple[str, str, Any]]:
    """(dotted name, sentence, default) of every field; `base` holds the defaults where another class has set them."""
    sentences = field_sentences(cls)
    rows: list[tuple[str, str, Any]] = []
    for field in dataclasses.fields(cls):
        if OPEN in field.metadata:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = default if base is None else getattr(base, field.name)
        if is_config(default):
            rows += _rows(type(default), f"{prefix}{field.name}.", default)
        else:
            rows.append((prefix + field.name, sentences.get(field.name, ""), default))
    return rows


def field_sentences(cls: type) -> dict[str, str]:
    """The string under each field, also of one that a class has from another. Python drops it, so it is read from the source."""
    found: dict[str, str] = {}
    for base in reversed([one for one in cls.__mro__ if dataclasses.is_dataclass(one)]):
        found |= _own_sentences(base)
    return found


def _own_sentences(cls: type) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "(required)"
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, dict):
        return f"(default: {', '.join(value)})"
    if isinstance(value, tuple):
        return f"(default [{','.join(map(str, value))}])"
    return f"(default {str(value).lower() if isinstance(value, bool) else value})"


def _entry(name: str, text: str, width: int, column: int = FLAG_COLUMN) -> str:
    indent = " " * column
    lines = textwrap.wrap(text, max(width - column, 30), break_on_hyphens=False) or [""]
    head = f"  {name}".ljust(column)
    if not head.endswith(" "):
        return "\n".join([head, *(indent + line for line in lines)])
    return "\n".join([(head + lines[0]).rstrip(), *(indent + line for line in lines[1:])])
