"""Named complete configs: what `--recipe=NAME` starts from. Every policy brings its own (`policies/registry.py`).

A recipe is a nested dict with the names of `RunConfig`; the file of `--config_path` and the flags are laid over it.
"""

from copy import deepcopy
from typing import Any

from vlatune.names import did_you_mean
from vlatune.policies.registry import Recipe, all_recipes


def find_recipe(name: str) -> Recipe:
    recipes = all_recipes()
    if name not in recipes:
        raise ValueError(f"unknown recipe '{name}'{did_you_mean(name, recipes)} (there are {', '.join(recipes)})")
    return recipes[name]


def get_recipe(name: str) -> dict[str, Any]:
    """The values of a recipe, as a dict of your own."""
    return deepcopy(dict(find_recipe(name).values))
