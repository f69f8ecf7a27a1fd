"""SmolVLA's own settings equal LeRobot's: flags of what trains, architectures, image positions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from parity.policies.flow_parity import (
    GRADIENT_RTOL,
    LOSS_RTOL,
    Case,
    check_parity,
    distance,
    lerobot_loss,
    load_lerobot,
    make_case,
    trained,
)

from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.policies.base import ModuleOptions
from vlatune.policies.smolvla.model import make_patch_positions, run_tower
from vlatune.run_setup import make_setup

FLAGS = {
    "expert": {"train_expert_only": True, "freeze_vision_encoder": True},
    "language": {"train_expert_only": False, "freeze_vision_encoder": True},
    "full": {"train_expert_only": False, "freeze_vision_encoder": False},
}
"""Modes that LeRobot has flags for."""
TOLERANCES = {"float32": (LOSS_RTOL, GRADIENT_RTOL), "bfloat16": (2.0**-8, 2.0**-5)}


@pytest.fixture
def case(cases) -> Case:
    return cases("smolvla")


@pytest.mark.parametrize("train", FLAGS)
@pytest.mark.parametrize("train_state_proj", [True, False])
def test_the_same_parameters_train_as_with_lerobots_flags(case: Case, train: str, train_state_proj: bool) -> None:
    overrides = {} if train_state_proj else {"train_state_proj": False}
    policy = PolicyConfig(path=str(case.base), type="smolvla", train="expert", overrides=overrides)
    setup = make_setup(RunConfig(dataset=DatasetConfig(root=(str(case.dataset),)), policy=policy))
    module: Any = setup.adapter.load_module(setup.policy, setup.binding, ModuleOptions(train=train, dtype="float32"))
    theirs = load_lerobot(case.base, train_state_proj=train_state_proj, **FLAGS[train])
    assert trained(module.policy) == trained(theirs)
    check_parity(module.train(), theirs, module(case.batch).loss, lerobot_loss(theirs, case.batch))


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_mode": "self_attn"},
        {"self_attn_every_n_layers": 0},
        {"num_vlm_layers": 4, "num_expert_layers": 2, "self_attn_every_n_layers": -1},
        {"prefix_length": 60, "pad_language_to": "max_length"},
    ],
    ids=str,
)
def test_other_architectures(dataset_v3, tmp_path, settings: dict[str, Any]) -> None:
    case = make_case("smolvla", tmp_path / "base", dataset_v3, **settings)
    theirs, module = load_lerobot(case.base, **FLAGS["full"]), case.load("full")
    assert trained(module.policy) == trained(theirs)
    check_parity(module, theirs, module(case.batch).loss, lerobot_loss(theirs, case.batch))


def test_the_loss_of_an_evaluation_does_not_depend_on_the_batch_size(case: Case) -> None:
    module = case.load("expert").eval()
    single = [module({key: value[row : row + 1] for key, value in case.batch.items()}).loss for row in range(4)]
    assert distance(torch.stack(single).mean(), module(case.batch).loss) <= LOSS_RTOL
    assert distance(torch.stack(single), lerobot_loss(case.lerobot, case.batch, reduction="none")) <= LOSS_RTOL


@pytest.mark.parametrize("pixels", [32, 48, 64])
def test_patch_positions_equal_transformers(case: Case, pixels: int) -> None:
    joint = case.load("expert").policy.model.vlm_with_expert
    image = torch.randint(0, 256, (2, 3, pixels, pixels), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    positions = make_patch_positions(replace(case.setup.policy, image_hw=(pixels, pixels)))
    vlm = joint.get_vlm_model()
    ours = vlm.connector(run_tower(vlm, image, positions))
    theirs = joint.embed_image(image.float() / 255.0 * 2.0 - 1.0)
    assert distance(ours, theirs) <= LOSS_RTOL
