"""The registry lists built-in policies and those of other packages, without importing torch."""

from pathlib import Path

import pytest

from vlatune import registry
from vlatune.policies.base import PolicyAdapter


def install(folder: Path, name: str, entry_point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the metadata of a package with an entry point, as an installer does."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vlatune.policies]\n{entry_point}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("name", registry.PACKAGES)
def test_every_policy_has_complete_metadata(name: str) -> None:
    info = registry.get_policy_info(name)
    assert info.type == name
    adapter = registry.get_adapter(name)
    assert isinstance(adapter, PolicyAdapter)
    assert adapter.schema.type == name
    assert info.small_recipe in info.recipes
    for recipe in info.recipes.values():
        assert recipe.config.policy.type == name
        assert recipe.config.policy.train in info.train_modes


def test_an_unknown_type_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--policy\.type=pi5: must be one of pi05.*did you mean pi05"):
        registry.get_policy_info("pi5")


def test_an_entry_point_of_another_type_is_rejected(tmp_path, monkeypatch) -> None:
    install(tmp_path, "wrong", "wrong = json:loads", monkeypatch)
    with pytest.raises(ValueError, match=r"'wrong = json:loads'.*'wrong' must refer to a vlatune.registry.PolicyInfo"):
        registry.get_policy_info("wrong")


def test_an_entry_point_that_cannot_be_imported_names_its_package(tmp_path, monkeypatch) -> None:
    (tmp_path / "breaks.py").write_text("import no_such_module\n")
    install(tmp_path, "breaks", "broken = breaks:POLICY", monkeypatch)
    with pytest.raises(RuntimeError, match=r"'broken = breaks:POLICY'.*package 'breaks' cannot be imported.*uninstall"):
        registry.get_policy_info("broken")
