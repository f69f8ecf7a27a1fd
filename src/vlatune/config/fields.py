"""Fields of config classes: types, limits in the metadata, help in the string below each field.

steps: int = setting(3000, minimum=1)
\"""Number of optimizer steps.\"""
"""

import ast
import dataclasses
import inspect
import textwrap
from operator import ge, gt, le, lt
from typing import Any, Literal, get_type_hints

LIMITS = {"minimum": ("at least", ge), "above": ("above", gt), "maximum": ("at most", le), "below": ("below", lt)}
"""Limits of a number: their names in messages, and whether a number and a limit are valid."""
MAX_NUMBER = 10**15
"""Maximum of any number; larger ones would lose digits in JSON."""
POLICY_OPTIONS = "policy_options"
"""Metadata key of the dict field that holds the options of the selected policy."""


def setting(
    default: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    with_base: Literal["same", "any", "unused"] = "same",
) -> Any:
    """Return a field with limits on its number, or on each number of a tuple.

    `with_base` is for policy options: the values that a base model allows are the one of its
    weights ("same"), any, or none, because the option only affects new models ("unused").
    """
    limits = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    return dataclasses.field(default=default, metadata={**given, "with_base": with_base})


def violation(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Return the requirement that a value violates; None if it is valid."""
    limits = {name: field.metadata[name] for name in LIMITS if name in field.metadata}
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if not abs(number) <= MAX_NUMBER:
            return f"must be {MAX_NUMBER} or less"
        if not all(LIMITS[name][1](number, limit) for name, limit in limits.items()):
            if [*limits] == ["minimum"]:
                return f"must be {limits['minimum']} or more"
            return f"must be {' and '.join(f'{LIMITS[name][0]} {limit}' for name, limit in limits.items())}"
    return None


def check_limits(config: Any, prefix: str = "--") -> None:
    """Raise a ValueError if a field of the config, or of a nested one, is outside its limits."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_limits(value, f"{prefix}{field.name}.")
        elif problem := violation(field, value):
            raise ValueError(f"{prefix}{field.name}={value}: {problem}")


def field_types(cls: type) -> dict[str, Any]:
    """Return field name -> type, without the field for policy options."""
    hints = get_type_hints(cls)
    return {one.name: hints[one.name] for one in dataclasses.fields(cls) if POLICY_OPTIONS not in one.metadata}


def leaf_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> type of every field, including nested config classes."""
    found: dict[str, Any] = {}
    for name, kind in field_types(cls).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= leaf_types(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = kind
    return found


def field_help(cls: type) -> dict[str, str]:
    """Return the string below each field, including inherited fields, parsed from the source."""
    found: dict[str, str] = {}
    for base in reversed([one for one in cls.__mro__ if dataclasses.is_dataclass(one)]):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
