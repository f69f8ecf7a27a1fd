"""The registry is the one list of policies, and costs nothing to read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from vlatune.policies import registry
from vlatune.policies.base import PolicyAdapter

SRC = Path(registry.__file__).parents[1]
OWN_WORDS = r"pi[_-]?0\.?5|paligemma"
"""By which PI0.5 is called."""


def mentions(pattern: str) -> list[str]:
    """Lines that name a policy outside of its package; benchmarks may, they compare it with its peers."""
    rooms = (SRC / "policies" / "pi05", SRC / "policies" / "pi0", SRC / "bench")  # PI0 is made of PI0.5's parts
    files = [path for path in sorted(SRC.rglob("*.py")) if not any(room in path.parents for room in rooms)]
    return [
        f"{path.relative_to(SRC).as_posix()}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(pattern, line, re.IGNORECASE)
    ]


def test_nothing_outside_a_policys_package_names_it() -> None:
    assert mentions(OWN_WORDS) == ['policies/registry.py: "pi05": "vlatune.policies.pi05",']


def test_the_list_costs_nothing() -> None:
    code = (
        "import sys; from vlatune.policies import registry; registry.all_recipes(); registry.policy_types(); "
        "print(*({'torch', 'lerobot', 'numpy', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", registry.PACKAGES)
def test_every_card_is_whole(name: str) -> None:
    card = registry.get_policy(name)
    assert card.type == name
    assert isinstance(card.adapter(), PolicyAdapter)
    assert card.adapter().schema.type == name
    for recipe in card.recipes.values():
        assert recipe.values["policy"]["type"] == name
        assert recipe.values["policy"]["train"] in card.train_ways


def test_an_unknown_type_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"--policy\.type=pi5: must be one of pi05.*did you mean pi05"):
        registry.get_policy("pi5")


def test_an_entry_point_that_is_no_card_is_refused(tmp_path, monkeypatch) -> None:
    information = tmp_path / "wrong-0.1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 0.1\n")
    (information / "entry_points.txt").write_text("[vlatune.policies]\nwrong = json:loads\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"'wrong = json:loads'.* is not the card of a policy of type 'wrong'"):
        registry.get_policy("wrong")


def test_installed_packages_are_looked_through_once_for_each_path(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(registry, "entry_points", lambda *, group: asked.append(group) or [])
    monkeypatch.syspath_prepend(str(tmp_path / "one"))
    for _ in range(2):
        assert registry.policy_types() == tuple(registry.PACKAGES)
    assert len(asked) == 1
    monkeypatch.syspath_prepend(str(tmp_path / "two"))  # as a package that is installed elsewhere
    registry.policy_types()
    assert len(asked) == 2
