"""Prompts are not truncated: tiny models are long enough for every state, and a run can set the length."""

import json

import numpy as np
import pytest

from vlatune.batch import STATE, TASK
from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig
from vlatune.export.policy_files import make_policy_files
from vlatune.policies.base import Fit
from vlatune.policies.pi05.spec import StatePrompt
from vlatune.policies.pi05.tiny import make_tiny_pi05
from vlatune.policies.processors import PREPROCESSOR
from vlatune.policies.tokenizer import Tokenise
from vlatune.registry import get_adapter
from vlatune.run_setup import make_setup

TASKS = ("put the red cube on the blue pad", "öffne die Schublade, bitte!")


def test_a_tiny_model_reads_prompts_with_all_states_below_the_range(tmp_path):
    folder = make_tiny_pi05(
        tmp_path / "base",
        cameras=("observation.images.top",),
        state_dim=14,
        action_dim=14,
        horizon=4,
        image_size=48,
        tasks=TASKS,
    )
    spec = get_adapter("pi05").read_spec(folder)
    columns = {STATE: np.full((2, 14), -1.5, np.float32), TASK: np.array(TASKS, dtype=object)}
    prompts = StatePrompt()(columns)
    assert "State: -1 -1" in prompts[TASK][0]
    assert max(len(ids) for ids in spec.tokenizer.encode(list(prompts[TASK]), 10**6)) <= spec.max_tokens


@pytest.mark.parametrize("kind", ["pi05", "pi0", "smolvla"])
def test_a_run_can_set_the_prompt_length(kind, dataset_v3, tmp_path):
    from vlatune.data.meta.dataset_meta import load_meta
    from vlatune.train.driver.tiny_base import fit_datasets

    adapter, base = get_adapter(kind), tmp_path / "base"
    fit: Fit = fit_datasets((load_meta(str(dataset_v3)),), seed=0, max_dims=32)
    adapter.make_base(base, fit, small=True, place=base)
    stored = adapter.read_spec(base).max_tokens
    flags = [f"--policy.type={kind}", f"--policy.path={base}", f"--dataset.root={dataset_v3}", "--batch_size=4"]
    before = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    setup = make_setup(parse_flags([*flags, "--policy.tokenizer_max_length=96"], RunConfig))
    assert (setup.policy.max_tokens, stored < 96) == (96, True)
    (step,) = (one for one in setup.training_transforms() if isinstance(one, Tokenise))
    assert step.max_length == 96
    files = make_policy_files(setup.policy, setup.binding, setup.stats, dtype=None)
    assert json.loads(files["config.json"])["tokenizer_max_length"] == 96
    (config,) = (
        one["config"]
        for one in json.loads(files[PREPROCESSOR])["steps"]
        if one["registry_name"] == "tokenizer_processor"
    )
    assert config["max_length"] == 96
    assert {path: path.read_bytes() for path in base.rglob("*") if path.is_file()} == before
