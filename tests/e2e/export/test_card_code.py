"""The Python code in the card of a tiny export loads it with LeRobot alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import make_finished, small_config

from vlatune import cli
from vlatune.config.settings import PolicyConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.registry import get_adapter
from vlatune.train.driver.tiny_base import fit_datasets

pytestmark = pytest.mark.slow
POLICIES = ("pi05", "pi0", "smolvla", "act", "diffusion")

ALONE = """
import os, re, sys
sys.modules["vlatune"] = None  # importing it fails
import torch
for folder in sys.argv[1:]:
    os.chdir(folder)  # the card names the folder DIR
    (lines,) = re.findall(r"## In Python.*?```python\\n(.*?)```", open("DIR/README.md").read(), re.DOTALL)
    names = {}
    exec(lines, names)
    policy, config = names["policy"].eval(), names["config"]
    shapes = {key: one.shape for key, one in config.input_features.items()}
    generator = torch.Generator().manual_seed(1)
    seen = {key: torch.rand(1, *shape, generator=generator) for key, shape in shapes.items()}
    torch.manual_seed(2)
    action = names["postprocess"](policy.select_action(names["preprocess"](seen | {"task": ["reach the red pad"]})))
    size = sum(one.numel() for one in policy.parameters())
    print("card:", config.type, size, tuple(action.shape), bool(torch.isfinite(action).all()))
"""


@pytest.fixture(scope="module")
def exports(dataset_v3, tmp_path_factory) -> dict[str, Path]:
    """Train the tiny model of every policy for two steps and export it as DIR."""
    fit = fit_datasets((load_meta(str(dataset_v3)),), seed=0, max_dims=32)
    made = {}
    for kind in POLICIES:
        place = tmp_path_factory.mktemp(kind)
        get_adapter(kind).make_base(place / "base", fit, small=True, place=place / "base")
        policy = PolicyConfig(type=kind, path=str(place / "base"), train="full")
        run_dir = make_finished(small_config(dataset_v3, place / "base", place / "run", policy=policy))
        assert cli.main(["export", str(run_dir), str(place / "DIR")]) == cli.OK
        made[kind] = place
    return made


@pytest.mark.timeout(900)
def test_the_code_of_the_card_loads_the_export_without_vlatune(exports):
    command = [sys.executable, "-c", ALONE, *map(str, exports.values())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("card:")]
    assert [line[0] for line in loaded] == list(POLICIES)
    for kind, size, *shape, finite in loaded:
        assert int(size) < 20_000_000, f"{kind} was not built at its own size"
        assert finite == "True", (kind, shape)


@pytest.mark.parametrize("kind", POLICIES)
def test_the_card_states_whether_lerobot_loads_it_directly(exports, kind):
    card = (exports[kind] / "DIR" / "README.md").read_text()
    needs_lines = kind in ("pi05", "pi0", "smolvla")
    assert ("LeRobot loads it." in card) != needs_lines
    assert ("This is a tiny model" in card) == needs_lines
