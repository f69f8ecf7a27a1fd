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
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from vlatune.errors import did_you_mean
from vlatune.files import RefusedFileError, read_file
from vlatune.flag_values import ExpectationError, convert, is_repeatable, kind_name, load_yaml, shown
from vlatune.recipes import get_recipe


@dataclass(frozen=True)
class Given:
    """A value for one field, and where it came from."""

    value: Any
    place: str


Layer = dict[str, Given]


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
    path = flags.pop("config_path", None)
    file_layer = _read_file(Path(path.value), cls) if path else {}
    return _build(cls, _recipe_layer(cls, file_layer | flags) | file_layer | flags), values


def config_from_dict[T](cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """The config in a nested dict, for example a run's config.json; `where` names its origin in errors."""
    return _build(cls, _flatten(cls, values, where))


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
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _split_argv(argv: Sequence[str], cls: type) -> tuple[Layer, list[str]]:
    known = leaf_types(cls) | {"config_path": str}
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
            raise ValueError(f"unknown flag --{name}{did_you_mean(name, known, prefix='--')}")
        text = text if equals else _next_value(name, known[name], words)
        if is_repeatable(known[name]):
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


def _recipe_layer(cls: type, given: Layer) -> Layer:
    if "recipe" not in given:
        return {}
    name = _checked(given["recipe"], str | None)
    return {} if name is None else _flatten(cls, get_recipe(name), f"recipe {name}")


def _flatten(cls: type, values: Any, where: str, prefix: str = "") -> Layer:
    if values in (None, ""):  # a heading with nothing under it
        return {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: {prefix[:-1] or 'the file'} must be a mapping of names to values")
    types = _field_types(cls)
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
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        kind, name = _field_types(cls)[field.name], prefix + field.name
        if is_config(kind):
            default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            values[field.name] = _build(kind, layer, f"{name}.", values.get(field.name, default))
        elif name in layer:
            values[field.name] = _checked(layer[name], kind)
        elif base is None and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"--{name} is missing")
    return cls(**values)


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
    return "\n\n".join("\n".join([f"{group or 'flags'}:", *lines]) for group, lines in groups.items())


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
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = default if base is None else getattr(base, field.name)
        if is_config(default):
            rows += _rows(type(default), f"{prefix}{field.name}.", default)
        else:
            rows.append((prefix + field.name, sentences.get(field.name, ""), default))
    return rows


def field_sentences(cls: type) -> dict[str, str]:
    """The string under each field. Python drops it, so it is read from the source."""
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
