"""Samples of PI0.5, PI0 and SmolVLA equal LeRobot's processors; their runs resume exactly and are exported."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import check_actions
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from parity.policies.flow_parity import Case
from safetensors.torch import load_file
from small_run import running, small_config

from vlatune.batch import ACTION, STATE, TASK, TOKEN_MASK, TOKENS
from vlatune.config.settings import OptimizerConfig, PolicyConfig
from vlatune.data.reader import make_unit, read_unit
from vlatune.data.transforms import apply_all


@pytest.fixture(params=["pi05", "pi0", "smolvla"])
def case(request, cases) -> Case:
    return cases(request.param)


def read_rows(setup: Any) -> dict[str, np.ndarray]:
    """Return every row of an episode as the reader delivers it."""
    frames = np.arange(int(setup.metas[0].episodes.length[1]))
    return read_unit(setup.specs[0], make_unit(setup.metas[0], setup.specs[0], 1, frames, frames))


def test_samples_equal_those_of_lerobots_processors(case: Case, dataset_v3) -> None:
    rows = read_rows(case.setup)
    tasks = np.empty(len(rows[TASK]), dtype=object)
    tasks[:] = [("", "ends with\n", "two\nlines", str(rows[TASK][0]))[row % 4] for row in range(len(tasks))]
    rows[TASK] = tasks
    ours = apply_all(case.setup.eval_transforms(0), rows)
    stats = json.loads((dataset_v3 / "meta/stats.json").read_text())
    tokenizer = {"tokenizer_name": str(case.base / "tokenizer"), "padding": "max_length"}
    preprocess, _ = make_pre_post_processors(
        PreTrainedConfig.from_pretrained(case.base),
        str(case.base),
        preprocessor_overrides={"tokenizer_processor": tokenizer, "normalizer_processor": {"stats": stats}},
        postprocessor_overrides={"unnormalizer_processor": {"stats": stats}},
    )
    theirs = preprocess({key: torch.from_numpy(rows[key]) for key in (STATE, ACTION)} | {TASK: tasks.tolist()})
    for key in (TOKENS, TOKEN_MASK, STATE):
        assert np.array_equal(ours[key], theirs[key].numpy()), key
    width = case.setup.binding.action_dim
    assert np.array_equal(ours[ACTION][..., :width], theirs[ACTION].numpy())
    assert not ours[ACTION][..., width:].any()


def test_images_are_padded_and_resized_as_by_lerobots_policy(cases) -> None:
    """SmolVLA pads on the left and on top. LeRobot resizes floats, the reader uint8."""
    case = cases("smolvla")
    spec = case.setup.specs[0]
    recorded_size = replace(spec, cameras=tuple(replace(camera, height=96, width=96) for camera in spec.cameras))
    recorded, resized = read_rows(replace(case.setup, specs=(recorded_size,))), read_rows(case.setup)
    for camera in case.setup.policy.cameras:
        (image,), _ = case.lerobot.prepare_images({camera: torch.from_numpy(recorded[camera]).float() / 255.0})
        ours = torch.from_numpy(resized[camera]).float() / 255.0 * 2.0 - 1.0
        assert (ours - image).abs().max() <= 2 / 255 + 1e-6


def test_a_run_resumes_bit_exactly_and_lerobot_loads_its_export(case: Case, dataset_v3, tmp_path, monkeypatch) -> None:
    config = small_config(
        dataset_v3,
        case.base,
        tmp_path / "run",
        policy=PolicyConfig(path=str(case.base), type=case.kind, train="expert"),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    with running(config) as complete:
        complete.step()
        complete.save()
        expected = [complete.step() for _ in range(2)]
    torch.manual_seed(1)  # another process has another state
    with running(config) as resumed:
        assert resumed.done == 1
        assert [resumed.step() for _ in range(2)] == expected
        resumed.save()
    assert all(torch.equal(complete.trainable[name], resumed.trainable[name]) for name in complete.trainable)

    folder = tmp_path / "exported"
    monkeypatch.chdir("/")
    check_actions(resumed, folder, atol=1e-5)
    after, before = (load_file(Path(one) / "model.safetensors") for one in (folder, case.base))
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert after.keys() == before.keys()
    assert changed == {name.removeprefix("policy.") for name in resumed.trainable}
