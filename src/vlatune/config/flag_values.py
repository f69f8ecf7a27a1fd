"""Convert one value, given as text or JSON, to the type of its field: `convert("1e-4", float)`.

Text is parsed by the expected type, not by its appearance: a job named 007 or `no` stays text, and
episodes 1:10 are a range. YAML's implicit types (8 for 010, 70 for 1:10, False for `no`) are
therefore disabled. Supported types: int, float, bool, str, `int | str` (kept as text), `X | None`,
Literal, tuples and dicts of these, and dicts of dataclasses.
"""

import dataclasses
import math
import re
import reprlib
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vlatune.errors import did_you_mean

NULLS = (None, "null", "None", "~", "")
MAX_SHOWN = 80
_SHORT = reprlib.Repr(maxlevel=2)
RANGE = re.compile(r"(\d{1,12}):(\d{1,12})")
MAX_RANGE = 1_000_000


class ExpectationError(ValueError):
    """A value does not fit its type; the message states what is expected."""


def convert(value: Any, kind: Any) -> Any:
    """Convert `value` to `kind`, or raise an ExpectationError."""
    origin, args = get_origin(kind), get_args(kind)
    if is_optional(kind):
        given_once = value[0] if isinstance(value, list) and len(value) == 1 else value
        return None if given_once in NULLS else convert(value, required_kind(kind))
    if origin is tuple:
        return tuple(_items(value, args[0])) if is_repeatable(kind) else _fixed(value, args)
    if origin is dict:
        pairs = _load(value, dict, 'a mapping, as {"from": "to"}')
        return {convert(key, args[0]): convert(one, args[1]) for key, one in pairs.items()}
    if origin is Literal:
        return _choice(value, args)
    if dataclasses.is_dataclass(kind):
        return _record(value, kind)
    return _SCALARS[kind](value)


def is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def required_kind(kind: Any) -> Any:
    """Return `int` for `int | None`; other types are returned unchanged."""
    if not is_optional(kind):
        return kind
    (found,) = (one for one in get_args(kind) if one is not type(None))
    return found


def is_repeatable(kind: Any) -> bool:
    """True for tuples of any length, whose flags may be repeated."""
    kind = required_kind(kind)
    return get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis


def kind_name(kind: Any) -> str:
    """Format a type for the help: INT, [FLOAT,FLOAT], heads|full."""
    kind = required_kind(kind)
    args = get_args(kind)
    if get_origin(kind) is tuple:
        return f"[{kind_name(args[0])},...]" if is_repeatable(kind) else f"[{','.join(map(kind_name, args))}]"
    if get_origin(kind) is dict:
        return "JSON"
    if get_origin(kind) is Literal:
        return "|".join(map(str, args))
    return {int: "INT", float: "FLOAT", bool: "true|false", str: "TEXT"}[kind]


def shown(value: Any) -> str:
    """Shorten a value to one line for a message."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def load_yaml(text: str) -> Any:
    """Parse YAML to lists and dicts of strings; BaseLoader supports no other types and no tags."""
    import yaml

    try:
        return yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 (knows even less than SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d[\d_]{0,30}", value):
        return int(value.replace("_", ""))
    raise ExpectationError("expected a whole number")


def _float(value: Any) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ExpectationError("expected a number, as 0.5 or 1e-4")


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ExpectationError("expected true or false")


def _str(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ExpectationError("expected text")


_SCALARS = {
    int: _int,
    float: _float,
    bool: _bool,
    str: _str,
    int | str: lambda value: _str(str(value) if type(value) is int else value),
}


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if value == choice or (isinstance(value, str) and value == str(choice)):
            return choice
    raise ExpectationError(f"expected one of {', '.join(map(str, choices))}")


def _items(value: Any, kind: Any) -> list[Any]:
    """Expand each part, which may be an item, a list `[0,1]` or a range `0:10`."""
    found: list[Any] = []
    if kind is float and isinstance(value, (int, float)):  # JSON numbers; text is handled below
        value = [value]
    if not isinstance(value, (list, tuple, str)):
        raise ExpectationError("expected a list, as [a,b]")
    for part in [value] if isinstance(value, str) else value:
        span = RANGE.fullmatch(part) if kind is int and isinstance(part, str) else None
        if span:
            begin, end = int(span[1]), int(span[2])
            if not begin < end <= begin + MAX_RANGE:  # checked before a list is built
                raise ExpectationError(f"expected a range of 1 to {MAX_RANGE:,} numbers")
            found += range(begin, end)
        elif isinstance(part, str) and part.lstrip().startswith("["):
            found += _items(_load(part, list, "a list, as [a,b]"), kind)
        else:
            found.append(convert(part, kind))
        if len(found) > MAX_RANGE:
            raise ExpectationError(f"expected at most {MAX_RANGE:,} items")
    return found


def _fixed(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    expected = f"a list of {len(kinds)}, as {kind_name(tuple[kinds])}"
    parts = value if isinstance(value, tuple) else _load(value, list, expected)
    if len(parts) != len(kinds):
        raise ExpectationError(f"expected {expected}")
    return tuple(convert(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _record(value: Any, kind: Any) -> Any:
    """Convert a mapping to a dataclass; missing fields have their defaults."""
    types = get_type_hints(kind)
    if not isinstance(value, dict):
        raise ExpectationError(f"expected a mapping with the names {', '.join(types)}")
    for name in value:
        if name not in types:
            raise ExpectationError(
                f"unknown name {shown(name)}{did_you_mean(str(name), types) or '; there are ' + ', '.join(types)}"
            )
    return kind(**{name: convert(one, types[name]) for name, one in value.items()})


def _load(value: Any, kind: type, expected: str) -> Any:
    """Parse text as YAML; values of JSON are returned."""
    try:
        found = load_yaml(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, kind):
        raise ExpectationError(f"expected {expected}")
    return found
