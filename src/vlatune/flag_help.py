"""The help of a command, made from its config class: flag, type, default, and the sentence under the field."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from vlatune.flag_values import kind_name
from vlatune.flags import is_config, leaf_types

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
