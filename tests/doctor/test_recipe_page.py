"""docs/which_recipe.md and docs/memory.md have what doctor computes for the published PI0.5, from shapes alone."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from repository_files import ROOT

from vlatune.batch import ACTION, IDS, NOISE, TIME, TOKEN_MASK, TOKENS, Columns
from vlatune.config import PolicyConfig, RunConfig
from vlatune.doctor.device_memory import Fitting, fitting_ways, table_rows
from vlatune.policies.base import Binding
from vlatune.policies.registry import get_adapter

PAGE = (ROOT / "docs" / "which_recipe.md").read_text(encoding="utf-8")
MEMORY = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
CAMERAS = tuple(f"observation.images.{name}" for name in ("base", "left", "right"))


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> list[Fitting]:
    """Every way to train PI0.5 as LeRobot publishes it, on the meta device."""
    from lerobot.policies.pi05 import PI05Config

    folder = tmp_path_factory.mktemp("published")
    PI05Config(device="cpu", push_to_hub=False).save_pretrained(folder)
    binding = Binding(tuple((camera, camera) for camera in CAMERAS), (), 14, 14, ())
    spec = SimpleNamespace(folder=str(folder), cameras=CAMERAS, overrides={})
    setup: Any = SimpleNamespace(adapter=get_adapter("pi05"), policy=spec, binding=binding, stats=None)
    return fitting_ways(RunConfig(policy=PolicyConfig(dtype="bfloat16")), setup, rows_of_two())


def rows_of_two() -> Columns:
    shapes = {TOKENS: (200,), TOKEN_MASK: (200,), ACTION: (50, 32), NOISE: (1, 50, 32), TIME: (1,)}
    shapes |= dict.fromkeys(IDS, ())
    kinds = {TOKENS: np.int64, TOKEN_MASK: np.bool_} | dict.fromkeys(IDS, np.int64)
    made = {name: np.zeros((2, *shape), kinds.get(name, np.float32)) for name, shape in shapes.items()}
    made[TOKEN_MASK][:] = True  # prompts of full length: shorter ones would be cut
    return made | {camera: np.zeros((2, 3, 224, 224), np.uint8) for camera in CAMERAS}


def test_the_page_has_doctors_table(ways):
    for row in table_rows(ways):
        line = f"| {' | '.join(row)} |"
        assert line in PAGE, line


def test_the_page_has_the_counts(ways):
    for way in ways:
        told = re.search(rf"^\| `pi05-{way.train}` \|[^|]*\| ([\d.,]+) million \|", PAGE, re.MULTILINE)
        assert told, way.train
        assert float(told[1].replace(",", "")) == pytest.approx(way.footprint.num_trained / 1e6, rel=0.01)


def test_the_page_about_memory_has_the_activations_of_a_sample(ways):
    """Without and with layers computed again."""
    kept: dict[str, list[float]] = {}
    for way in ways:
        kept.setdefault(way.train, []).append((way.footprint.kept + way.footprint.kept_per_sample) / 1e9)
    for train, (plain, again) in kept.items():
        row = f"| `pi05-{train}` | {plain:.2f} | {again:.2f} |"
        assert row in MEMORY, row
