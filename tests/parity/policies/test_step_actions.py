"""A masked loss is the mean over the valid actions of an optimizer step, however the step is split."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_runs import OrderedBatches
from torch import Tensor

from vlatune.batch import ACTION_IS_PAD, IDS, SLOT, STEP_ACTIONS, Columns
from vlatune.config.settings import DatasetConfig, EvalConfig, PolicyConfig, RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.order.sample_order import epoch_order, step_samples
from vlatune.evaluate.held_out import read_held_out
from vlatune.evaluate.predictions import predict_all
from vlatune.feed.plan import Share, count_actions
from vlatune.policies.base import ModuleOptions
from vlatune.registry import get_adapter
from vlatune.run_setup import make_setup
from vlatune.train.driver.tiny_base import fit_datasets

POLICIES: dict[str, dict[str, Any]] = {
    "act": {"dropout": 0.0},
    "smolvla": {},
    "diffusion": {"do_mask_loss_for_padding": True},
    "pi0": {},
    "pi05": {},
}
GLOBAL_BATCH, STEP = 8, 1


@pytest.fixture(scope="module", params=POLICIES)
def config(request: pytest.FixtureRequest, dataset_v3: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    name = request.param
    fit = fit_datasets((load_meta(str(dataset_v3)),), seed=0, max_dims=32)
    folder = tmp_path_factory.mktemp("base") / name
    fit = replace(fit, horizon=8, overrides=POLICIES[name])
    get_adapter(name).make_base(folder, fit, small=True, place=folder)
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.2, run_length=4, window_rows=8),
        policy=PolicyConfig(type=name, path=str(folder), train="full", flow_samples=2 if name == "smolvla" else 1),
    )


@pytest.fixture(scope="module")
def module(config: RunConfig) -> Any:
    setup = make_setup(config)
    return setup.adapter.load_module(
        setup.policy, setup.binding, ModuleOptions.of(config.policy), stats=setup.stats
    ).train()


def micro_batches(config: RunConfig, num_workers: int, batch_size: int, grad_accum: int) -> list[Columns]:
    """Return the micro-batches of one optimizer step, of all workers."""
    split = replace(config, num_workers=num_workers, batch_size=batch_size, grad_accum=grad_accum)
    plan = make_setup(split).data_plan
    assert plan.order.global_batch == GLOBAL_BATCH
    return [
        batch
        for rank in range(num_workers)
        for batch in OrderedBatches(plan, Share(rank, num_workers), range(STEP, STEP + 1))
    ]


def run(module: Any, batches: list[Columns]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss and gradient of the micro-batches, as workers and accumulation average them."""
    losses = []
    for columns in batches:
        loss = module({k: torch.from_numpy(v) for k, v in columns.items() if k not in (*IDS, SLOT)}).loss
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad(set_to_none=True)
    return torch.stack(losses).mean(), gradients


def test_every_split_of_a_step_has_the_same_loss_and_gradients(config, module):
    (whole,) = micro_batches(config, 1, GLOBAL_BATCH, 1)
    loss, gradients = run(module, [whole])
    for split in ((2, 4, 1), (1, 4, 2), (2, 2, 2), (8, 1, 1)):
        parts = micro_batches(config, *split)
        valid = [int((~one[ACTION_IS_PAD]).sum()) for one in parts]
        assert len(set(valid)) > 1, "all micro-batches have as many valid actions, and the test proves nothing"
        found, theirs = run(module, parts)
        torch.testing.assert_close(found, loss, rtol=2e-6, atol=0)
        assert theirs.keys() == gradients.keys()
        for name, wanted in gradients.items():
            assert (theirs[name] - wanted).norm() <= 2e-5 * wanted.norm() + 1e-7, (split, name)


def test_one_worker_without_accumulation_has_lerobots_loss_to_the_bit(config, module):
    """The loss of a batch that does not say how large its step is equals LeRobot's, as the tests of each policy show."""
    (whole,) = micro_batches(config, 1, GLOBAL_BATCH, 1)
    assert np.array_equal(whole[STEP_ACTIONS], np.full(GLOBAL_BATCH, (~whole[ACTION_IS_PAD]).sum(), np.float32))
    loss, gradients = run(module, [whole])
    alone, its = run(module, [{key: values for key, values in whole.items() if key != STEP_ACTIONS}])
    assert torch.equal(loss, alone)
    assert all(torch.equal(gradients[name], its[name]) for name in gradients)


def test_the_validation_loss_is_the_same_for_every_batch_size(config, module):
    setup = make_setup(config)
    rows = read_held_out(setup, 12)
    assert rows[ACTION_IS_PAD].any()
    module.eval()
    losses = [predict_all(setup, module, rows, EvalConfig(batch_size=size))["none"].loss for size in (12, 5, 1)]
    module.train()
    assert losses == pytest.approx([losses[0]] * 3, rel=2e-6)


@pytest.mark.parametrize("offsets", [range(5), range(-1, 15), (0, 2, 4, 30)])
def test_valid_actions_are_counted(dataset_v3, small_base, offsets):
    """Also past the frames of an episode that begin no sample, and at offsets that leave it on either side."""
    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.2, run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(small_base), train="heads"),
        batch_size=GLOBAL_BATCH,
    )
    setup = make_setup(config)
    vectors = tuple(
        replace(one, offsets=tuple(offsets)) if one.column == "action" else one for one in setup.specs[0].vectors
    )
    plan = replace(setup.data_plan, specs=(replace(setup.specs[0], vectors=vectors),), transforms=())
    shorter = replace(plan.order, lengths=tuple(length - 3 for length in plan.order.lengths))
    for used in (
        plan,
        replace(plan, order=shorter, selection=replace(plan.selection, length=np.array(shorter.lengths))),
    ):
        batches = list(OrderedBatches(used, Share(0, 1), range(2 * used.order.batches_per_epoch)))
        for batch in batches:
            valid = (~batch[ACTION_IS_PAD]).sum()
            assert np.array_equal(batch[STEP_ACTIONS], np.full(GLOBAL_BATCH, valid, np.float32))


def test_each_robot_has_its_own_count(dataset_v3, dataset_v21, small_base):
    """Compute the loss as if all rows of a micro-batch were its own; without several robots all rows count together."""
    config = RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3), str(dataset_v21)), weight=(1.0, 3.0), run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(small_base), train="heads"),
        batch_size=2,
        grad_accum=4,
    )
    plan = make_setup(config).data_plan
    samples_SG = step_samples(plan.order, epoch_order(plan.order, 0), 0, 5)
    first_E = np.cumsum(plan.order.lengths) - plan.order.lengths
    episode_SG = np.searchsorted(first_E, samples_SG, side="right") - 1
    left_SG = np.array(plan.order.lengths)[episode_SG] - (samples_SG - first_E[episode_SG])
    valid_SG, dataset_SG = np.minimum(left_SG, 5), plan.selection.dataset[episode_SG]  # chunks of five actions
    together, each = count_actions(plan, samples_SG), count_actions(replace(plan, has_robots=True), samples_SG)
    for step in range(5):
        assert together[step].tolist() == [valid_SG[step].sum() / 4] * 2
        for number in range(2):
            own = valid_SG[step][dataset_SG[step] == number]
            assert len(own)
            assert each[step, number] == pytest.approx(2 * own.mean(), rel=1e-6)
