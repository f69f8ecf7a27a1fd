"""The one list of policies: flags, recipes, help and checks take their names from here. Imports neither torch nor LeRobot.

A policy is a package whose `__init__.py` holds its card, `POLICY`; what the card points to is imported when it is
asked for. Those of vlatune stand in PACKAGES. A package of somebody else is found by its entry point in the group
`vlatune.policies`, which names the card: nothing here has to be changed for it.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal

from vlatune.errors import did_you_mean

PACKAGES = {
    "pi05": "vlatune.policies.pi05",
    "pi0": "vlatune.policies.pi0",
    "act": "vlatune.policies.act",
    "diffusion": "vlatune.policies.diffusion",
    "smolvla": "vlatune.policies.smolvla",
}
"""Type -> package."""
DEFAULT_TYPE = next(iter(PACKAGES))
"""What is meant when none is named."""
GROUP = "vlatune.policies"


@dataclass(frozen=True)
class Recipe:
    """A complete config by name: `--recipe=NAME`."""

    description: str
    values: Mapping[str, Any]
    """Nested, with the names of `RunConfig`."""
    small: bool = False
    """The base is the policy's small twin, made for the run's datasets where no --policy.path is given."""


@dataclass(frozen=True)
class Override:
    """A field of LeRobot's config.json that a run may give a value of its own: `--policy.NAME=VALUE`."""

    kind: Any
    """Its type, as that of a config's field: int, `float | None`, `tuple[int, ...]`, Literal."""
    help: str
    """One sentence."""
    default: Any = None
    """LeRobot's: what counts where a base's config.json leaves the field out."""
    check: Callable[[Any], str | None] = lambda value: None
    """What a value must be, in words, if it is not; see `at_least`."""
    with_base: Literal["same", "any", "unused"] = "same"
    """What a base model allows: only what its weights were made for, any value, or it is of no use with one (it says how
    a new one is made)."""


def at_least(least: float) -> Callable[[Any], str | None]:
    """A check of an `Override`: none of its numbers may be smaller; None passes."""

    def check(value: Any) -> str | None:
        numbers = value if isinstance(value, tuple) else (value,)
        return None if all(one is None or one >= least for one in numbers) else f"must be {least} or more"

    return check


@dataclass(frozen=True)
class Policy:
    """A policy's card: what can be said of it without reading a file."""

    type: str
    """Of LeRobot's config.json, and of --policy.type."""
    title: str
    """As people call it."""
    adapter: Callable[[], Any]
    """Imports it and makes one: a `PolicyAdapter` (`base.py`, which lies above this module)."""
    train_ways: Mapping[str, str]
    """What --policy.train may be -> what is trained then; the first is the usual one."""
    recipes: Mapping[str, Recipe]
    settings: tuple[str, ...] = ()
    """Which of --policy.dtype, flow_samples, gradient_checkpointing, compile, lora_rank, lora_alpha and keep_features it
    understands."""
    hub_base: str | None = None
    """A hub repository to start from, for messages."""
    max_dims: int = 10_000
    """Dims of state and action that it takes at most."""
    from_scratch: bool = False
    """A run without --policy.path begins with random weights, made for its datasets in RUN/base."""
    fetches_start: bool = False
    """Whether such a run begins with a part of its weights from a hub, unless it is told not to."""
    has_prompt: bool = False
    """Whether the sentence takes part: decides which world the demo shows it."""
    overrides: Mapping[str, Override] = field(default_factory=dict)
    """Fields of its config.json that a run may change, by LeRobot's names."""
    frozen_fields: Mapping[str, bool] = field(default_factory=dict)
    """Of those that say what trains, LeRobot's defaults that are on; for --from_lerobot."""
    new_model_fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """Of a model that begins without a base, beside `overrides`: LeRobot's default, and the value here; for --from_lerobot."""

    @property
    def small_recipe(self) -> str:
        """The recipe of its small twin, which the demo trains."""
        small = [name for name, recipe in self.recipes.items() if recipe.small]
        if not small:
            raise ValueError(
                f"{self.title} (--policy.type={self.type}) has no recipe of a small twin, which a demo needs"
            )
        return small[0]


def policy_types() -> tuple[str, ...]:
    return (*PACKAGES, *(name for name in _others() if name not in PACKAGES))


def get_policy(name: str) -> Policy:
    """The card of a type; one that is not known is refused with those that are."""
    if name in PACKAGES:
        return import_module(PACKAGES[name]).POLICY
    if name in _others():
        return _load_other(name)
    raise ValueError(f"--policy.type={name}: must be one of {', '.join(policy_types())}{did_you_mean(name, PACKAGES)}")


def get_adapter(name: str) -> Any:
    """Its `PolicyAdapter`."""
    return get_policy(name).adapter()


def all_recipes() -> dict[str, Recipe]:
    """Recipe by name, policy after policy; of two with one name the first counts."""
    found: dict[str, Recipe] = {}
    for one in policy_types():
        found |= {name: recipe for name, recipe in get_policy(one).recipes.items() if name not in found}
    return found


def all_overrides() -> dict[str, Override]:
    """Override by name, of any policy; of two with one name the first counts."""
    found: dict[str, Override] = {}
    for one in policy_types():
        found = {**get_policy(one).overrides, **found}
    return found


def find_override(type_name: str, name: str) -> Override:
    """A policy's own; one that it does not have is refused with those that it has."""
    card = get_policy(type_name)
    if name not in card.overrides:
        hint = did_you_mean(name, card.overrides, prefix="--policy.") or (
            f"; it has {', '.join(card.overrides)}" if card.overrides else "; leave it out"
        )
        raise ValueError(f"{card.title} (--policy.type={card.type}) has no setting {name}{hint}")
    return card.overrides[name]


def check_overrides(type_name: str, given: Mapping[str, Any]) -> None:
    """Refuse those that the policy does not have, and values that it cannot take."""
    for name, value in given.items():
        expected = find_override(type_name, name).check(value)
        if expected is not None:
            raise ValueError(f"--policy.{name}={value}: {expected}")


def _others() -> Mapping[str, Any]:
    """Entry points of installed packages, by their names; a type of vlatune's own cannot be replaced."""
    return _entry_points(tuple(sys.path))


@cache
def _entry_points(path: tuple[str, ...]) -> Mapping[str, Any]:
    """Of the packages on that path: all of them are looked through, which takes 10 ms."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _load_other(name: str) -> Policy:
    point = _others()[name]
    card = point.load()
    if not isinstance(card, Policy) or card.type != name:
        raise ValueError(
            f"the entry point '{name} = {point.value}' in the group {GROUP} is not the card of a policy of type '{name}'; "
            f"it must name a vlatune.policies.registry.Policy whose type is its own name"
        )
    return card
