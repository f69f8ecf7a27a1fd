"""Named complete configs: what `--recipe=NAME` starts from. Every policy brings its own (`policies/registry.py`).

A recipe is a nested dict with the names of `RunConfig`; the file of `--config_path` and the flags are laid over it.
"""

from copy import deepcopy
from typing import Any

from vlatune.errors import did_you_mean
from vlatune.policies.registry import Recipe, all_recipes, get_policy, policy_types


def find_recipe(name: str) -> Recipe:
    """Policy after policy: a package of somebody else is imported only where none of ours has it."""
    for one in policy_types():
        if name in get_policy(one).recipes:
            return get_policy(one).recipes[name]
    recipes = all_recipes()
    raise ValueError(f"unknown recipe '{name}'{did_you_mean(name, recipes)} (there are {', '.join(recipes)})")


def recipe_of_type(type_name: str) -> str | None:
    """A policy that begins from nothing is asked for by its type: LeRobot's presets go along with it, in the recipe of its name."""
    if type_name not in policy_types():
        return None
    card = get_policy(type_name)
    return type_name if card.from_scratch and type_name in card.recipes else None


def get_recipe(name: str) -> dict[str, Any]:
    """The values of a recipe, as a dict of your own."""
    return deepcopy(dict(find_recipe(name).values))
