"""Write `--help` from a config class: flag, type, default, and the string below the field."""

import dataclasses
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from vlatune.config.fields import POLICY_OPTIONS, field_help, field_types, leaf_types
from vlatune.config.flag_values import kind_name
from vlatune.config.flags import FROM_LEROBOT, takes_lerobot

FLAG_COLUMN = 34
"""Column where help texts start; longer flags have their text on the next line."""


def help_text(cls: type) -> str:
    """Describe every flag of `cls`: its own first, then one group per nested config class."""
    groups: dict[str, list[str]] = {"": []}
    types = leaf_types(cls)
    for name, (text, default) in _rows(cls).items():
        groups.setdefault(name.rpartition(".")[0], []).append(_flag(name, types[name], text, default))
    groups[""].append(_entry("--config_path=FILE", "YAML or JSON file with the same names; flags override it."))
    if takes_lerobot(cls):
        text = "Run a `lerobot-train` command (quoted) or train_config.json; reports settings without an equivalent."
        groups[""].append(_entry(f"--{FROM_LEROBOT}=FILE_OR_COMMAND", text))
    return "\n\n".join("\n".join([f"{group or 'flags'}:", *lines]) for group, lines in groups.items())


def option_help(options: type) -> str:
    """Describe the options of a policy, which are flags --policy.NAME."""
    types = field_types(options)
    return "\n".join(_flag(f"policy.{name}", types[name], *row) for name, row in _rows(options).items())


def table(rows: Mapping[str, str]) -> str:
    """Format names and descriptions in two columns."""
    column = max(map(len, rows)) + 4
    return "\n".join(_entry(name, text, column) for name, text in rows.items())


def _rows(cls: type, prefix: str = "", base: Any = None) -> dict[str, tuple[str, Any]]:
    """Return dotted name -> (help text, default) of every field; `base` overrides the defaults."""
    texts = field_help(cls)
    rows: dict[str, tuple[str, Any]] = {}
    for field in dataclasses.fields(cls):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = default if base is None else getattr(base, field.name)
        if dataclasses.is_dataclass(default):
            rows |= _rows(type(default), f"{prefix}{field.name}.", default)  # pyright: ignore[reportArgumentType]
        elif POLICY_OPTIONS not in field.metadata:
            rows[prefix + field.name] = texts.get(field.name, ""), default
    return rows


def _flag(name: str, kind: Any, text: str, default: Any) -> str:
    if default is dataclasses.MISSING:
        text += " (required)"
    elif isinstance(default, dict | tuple) and default:
        text += f" (default {', '.join(map(str, default))})"
    elif default not in (None, (), {}):
        text += f" (default {str(default).lower() if isinstance(default, bool) else default})"
    return _entry(f"--{name}={kind_name(kind)}", text.strip())


def _entry(name: str, text: str, column: int = FLAG_COLUMN) -> str:
    width = min(shutil.get_terminal_size().columns, 120)
    lines = textwrap.wrap(text, max(width - column, 30), break_on_hyphens=False) or [""]
    head = f"  {name}".ljust(column)
    if not head.endswith(" "):
        lines = ["", *lines]
    return "\n".join([(head + lines[0]).rstrip(), *(" " * column + line for line in lines[1:])])
