"""The list of policies, from which flags, recipes, help and checks take their names.

Imports neither torch nor LeRobot. A policy is a package whose `__init__.py` defines its metadata,
`POLICY`; everything the metadata refers to is imported lazily. Other packages register a
`PolicyInfo` as an entry point in the group `vlatune.policies`.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, get_type_hints

from vlatune.errors import did_you_mean

PACKAGES = {name: f"vlatune.policies.{name}" for name in ("pi05", "pi0", "act", "diffusion", "smolvla")}
"""Maps policy type to package."""
DEFAULT_TYPE = next(iter(PACKAGES))
"""Type used if --policy.type is not given."""
GROUP = "vlatune.policies"
type OptionsClass = type[Any]


@dataclass(frozen=True)
class Recipe:
    """A complete named config: `--recipe=NAME`."""

    description: str
    config: Any
    """A `RunConfig`, with type and fine-tuning mode of the policy; flags override its values."""
    small: bool = False
    """Without --policy.path, create the policy's tiny model for the run's datasets."""


@dataclass(frozen=True)
class NoOptions:
    """Options of a policy that has none."""


@dataclass(frozen=True)
class PolicyInfo:
    """Metadata of a policy, available without reading a file."""

    type: str
    """The type in LeRobot's config.json and in --policy.type."""
    title: str
    """Display name."""
    adapter: str
    """`module:class` of the `PolicyAdapter` (`policies/base.py`), as in an entry point."""
    train_modes: Mapping[str, str]
    """Maps --policy.train to a description of what is trained; the first is the default."""
    recipes: Mapping[str, Recipe]
    options: OptionsClass = NoOptions
    """Dataclass of the fields of LeRobot's config.json that a run may set: --policy.NAME=VALUE. The
    defaults are LeRobot's; limits and help as in `config/fields.py`."""
    settings: tuple[str, ...] = ()
    """Which of --policy.dtype, flow_samples, gradient_checkpointing, compile, lora_rank, lora_alpha,
    keep_prefix and keep_prefix_dtype apply."""
    shards: bool = False
    """Whether --fsdp can shard it: the module is a `policies.modeling.FlowModule`."""
    hub_base: str | None = None
    """A hub repository to start from, for messages."""
    max_dims: int = 10_000
    """Maximum number of state and action dims."""
    from_scratch: bool = False
    """Without --policy.path, start from random weights, created in RUN/base for the datasets."""
    downloads_weights: bool = False
    """Whether such a run downloads part of its initial weights by default."""
    has_prompt: bool = False
    """Whether the policy reads the task instruction; selects the demo's environment."""
    frozen_fields: tuple[str, ...] = ()
    """Fields that freeze a part of the model and default to True in LeRobot; for --from_lerobot."""
    new_model_fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """LeRobot's default and ours of further fields of a new model; for --from_lerobot."""

    @property
    def option_defaults(self) -> dict[str, Any]:
        """LeRobot's default of every option."""
        return {one.name: one.default for one in dataclasses.fields(self.options)}

    def option(self, name: str) -> dataclasses.Field[Any]:
        """Return the field of an option, or raise with the names that exist."""
        for one in dataclasses.fields(self.options):
            if one.name == name:
                return one
        known = self.option_defaults
        hint = did_you_mean(name, known, prefix="--policy.") or (
            f"; it has {', '.join(known)}" if known else "; leave it out"
        )
        raise ValueError(f"{self.title} (--policy.type={self.type}) has no setting {name}{hint}")

    @property
    def small_recipe(self) -> str:
        """Name of the recipe for the tiny model, which the demo trains."""
        for name, recipe in self.recipes.items():
            if recipe.small:
                return name
        raise ValueError(f"{self.title} (--policy.type={self.type}) has no recipe for a tiny model, which a demo needs")


def policy_types() -> tuple[str, ...]:
    return (*PACKAGES, *(name for name in _plugins() if name not in PACKAGES))


def get_policy_info(name: str) -> PolicyInfo:
    """Return the metadata of a policy type, or raise with the known types."""
    if name in PACKAGES:
        return import_module(PACKAGES[name]).POLICY
    if name in _plugins():
        return _load_plugin(name)
    raise ValueError(f"--policy.type={name}: must be one of {', '.join(policy_types())}{did_you_mean(name, PACKAGES)}")


def get_adapter(name: str) -> Any:
    """Return the `PolicyAdapter` of a policy type."""
    return resolve_name(get_policy_info(name).adapter)()


def option_types() -> dict[str, Any]:
    """Return name -> type of the options of all policies; the first of two with one name wins."""
    found: dict[str, Any] = {}
    for name in policy_types():
        found |= {one: kind for one, kind in get_type_hints(get_policy_info(name).options).items() if one not in found}
    return found


def all_recipes() -> dict[str, Recipe]:
    """Return all recipes by name; the first of two with the same name wins."""
    found: dict[str, Recipe] = {}
    for name in policy_types():
        found |= {one: recipe for one, recipe in get_policy_info(name).recipes.items() if one not in found}
    return found


def find_recipe(name: str) -> Recipe:
    """Return a recipe; other packages are imported only if no built-in policy has it."""
    for type_name in policy_types():
        recipes = get_policy_info(type_name).recipes
        if name in recipes:
            return recipes[name]
    known = all_recipes()
    raise ValueError(f"unknown recipe '{name}'{did_you_mean(name, known)} (there are {', '.join(known)})")


def recipes_for(dims: int, *, small: bool, mixed: bool = False) -> list[str]:
    """Return the recipes that create their own base for `dims` dims (`mixed`: of several robots), without downloads first."""
    infos = {name: get_policy_info(recipe.config.policy.type) for name, recipe in all_recipes().items()}
    fitting = [
        name
        for name, recipe in all_recipes().items()
        if recipe.small == small
        and (small or infos[name].from_scratch)
        and infos[name].max_dims >= dims
        and (not mixed or get_adapter(infos[name].type).mixes_robots)
    ]
    return sorted(fitting, key=lambda name: not small and infos[name].downloads_weights)


def _plugins() -> Mapping[str, Any]:
    """Return the entry points of installed packages by name; they cannot replace built-in types."""
    return _entry_points(tuple(sys.path))


@cache
def _entry_points(path: tuple[str, ...]) -> Mapping[str, Any]:
    """Scan all installed packages, again only if sys.path changes."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _load_plugin(name: str) -> PolicyInfo:
    point = _plugins()[name]
    where = f"the entry point '{name} = {point.value}' in the group {GROUP} of the package '{point.dist and point.dist.name}'"
    try:
        info = point.load()
    except Exception as error:  # importing an installed package can raise anything
        raise RuntimeError(
            f"{where} cannot be imported ({type(error).__name__}: {error}); update or uninstall the package"
        ) from error
    if not isinstance(info, PolicyInfo) or info.type != name:
        raise ValueError(f"{where} must refer to a vlatune.registry.PolicyInfo of the type '{name}'")
    return info
