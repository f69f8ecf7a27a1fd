"""Check values read from JSON against types, because a run folder may come from a stranger."""

import dataclasses
import functools
import math
import reprlib
import types
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from vlatune.errors import did_you_mean

MAX_INTEGER = 10**18
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
NAMES |= {dict: "an object", list: "a list"}
_type_hints = functools.cache(get_type_hints)


def checked(value: Any, kind: Any, where: str) -> Any:
    """Return `value` as type `kind`, or raise and name the place.

    `kind` is a scalar, dict or list type, a union, a TypedDict (unknown keys are ignored) or a
    dataclass (unknown keys are rejected). Lists become tuples, also named ones, and integers become
    floats where required.
    """
    if kind is Any:
        return value
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return checked(value, _matching(value, args), where)
    if isinstance(value, dict) and is_typeddict(kind):
        _require_keys(value, kind.__required_keys__, where)
        hints = _type_hints(kind)
        return {
            key: checked(one, hints[key], f"{where}: '{key}'") if key in hints else one for key, one in value.items()
        }
    if isinstance(value, dict) and dataclasses.is_dataclass(kind):
        return _checked_dataclass(value, kind, where)
    if isinstance(value, dict) and origin is dict:
        return {key: checked(one, args[1], f"{where}: '{_shown(key)}'") for key, one in value.items()}
    is_named = hasattr(kind, "_fields")
    if isinstance(value, list) and (origin is tuple or is_named):
        kinds = tuple(_type_hints(kind).values()) if is_named else args
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        if len(kinds) != len(value):
            raise ValueError(f"{where}: expected {len(kinds)} items, found {len(value)}")
        items = [checked(one, kinds[number], f"{where}[{number}]") for number, one in enumerate(value)]
        return kind(*items) if is_named else tuple(items)
    if type(value) is int and abs(value) >= MAX_INTEGER:
        raise ValueError(f"{where}: expected a number of at most 18 digits, found {_shown(value)}")
    if kind is float and type(value) is int:
        return float(value)
    if kind in NAMES and type(value) is kind and not (isinstance(value, float) and not math.isfinite(value)):
        return value
    expected = NAMES.get(kind) or NAMES[list if origin is tuple or is_named else dict]
    raise ValueError(f"{where}: expected {expected}, found {_shown(value)}")


def _checked_dataclass(values: dict[str, Any], kind: Any, where: str) -> Any:
    hints, fields = _type_hints(kind), {one.name: one for one in dataclasses.fields(kind)}
    for name in values:
        if name not in fields:
            hint = did_you_mean(name, fields) or "; another version of vlatune wrote it: read it with that version"
            raise ValueError(f"{where}: '{_shown(name)}' is not known{hint}")
    required = [name for name, one in fields.items() if one.default is one.default_factory is dataclasses.MISSING]
    _require_keys(values, required, where)
    return kind(**{name: checked(value, hints[name], f"{where}: '{name}'") for name, value in values.items()})


def _require_keys(values: dict[str, Any], keys: Any, where: str) -> None:
    for name in keys:
        if name not in values:
            raise ValueError(f"{where}: '{name}' is missing")


def _matching(value: Any, kinds: tuple[Any, ...]) -> Any:
    """Return the member of a union that matches the value, or the first for the error message."""
    found = [kind for kind in kinds if _json_type(kind) is type(value)]
    wider = [kind for kind in kinds if kind is float and type(value) is int]
    return (found + wider + list(kinds))[0]


def _json_type(kind: Any) -> Any:
    """Return the type that the JSON parser returns for values of type `kind`."""
    if is_typeddict(kind) or dataclasses.is_dataclass(kind):
        return dict
    origin = get_origin(kind) or kind
    return list if origin is tuple else origin


def _shown(value: Any) -> str:
    return value[:80] if isinstance(value, str) else reprlib.repr(value)
