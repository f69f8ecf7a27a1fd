"""Training that resumes from a checkpoint equals uninterrupted training, random numbers included."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file
from small_run import SmallRun, make_finished, running, small_config
from torch import nn

from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.state import (
    EMA,
    OPTIMIZER,
    RNG,
    TRAINABLE,
    get_rng,
    load_ema,
    load_optimizer,
    load_result,
    load_rng,
    load_trainable,
    set_rng,
    stack_rng,
)
from vlatune.checkpoint.state_file import TrainState, parse_state, read_state, state_bytes
from vlatune.checkpoint.store import list_checkpoints
from vlatune.config.settings import OptimizerConfig, RunConfig
from vlatune.policies.base import Binding

CPU = torch.device("cpu")
BINDING = Binding((("top", "base_0_rgb"),), ("wrist",), 7, 2, ("x", "y"), also=(("state", "observation.state"),))


@pytest.fixture
def config(dataset_v3, small_base, tmp_path) -> RunConfig:
    optimizer = OptimizerConfig(lr=1e-2, ema_decay=0.9)
    return small_config(dataset_v3, small_base, tmp_path / "run", optimizer=optimizer)


def train(run: SmallRun, steps: int) -> list[float]:
    return [run.step() for _ in range(steps)]


def test_a_resumed_run_is_the_undisturbed_one_to_the_last_bit(config):
    with running(config) as whole:
        train(whole, 3)
        whole.save()
        expected = train(whole, 3)
    torch.manual_seed(1)  # another process has other states
    with running(config) as resumed:
        assert resumed.done == 3
        assert train(resumed, 3) == expected
    assert resumed.loss_sum == whole.loss_sum
    assert resumed.loss_count == whole.loss_count == 6
    assert whole.ema
    assert resumed.ema
    for mine, theirs in ((whole.trainable, resumed.trainable), (whole.ema.tensors(), resumed.ema.tensors())):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_snapshot_is_of_its_moment(config):
    """The loop continues while the thread still writes."""
    with running(config) as run:
        train(run, 1)
        before = {name: value.detach().clone() for name, value in run.trainable.items()}
        run.save()
        train(run, 2)
    stored = load_file(config.run_dir / "checkpoints" / "00000001" / TRAINABLE)
    assert all(torch.equal(stored[name], before[name]) for name in before)
    assert not torch.equal(
        before["policy.model.action_in_proj.bias"], run.trainable["policy.model.action_in_proj.bias"]
    )


def test_a_checkpoint_holds_only_what_trains_in_safetensors_and_json(config):
    make_finished(config)
    (folder,) = list_checkpoints(config.run_dir)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {path.rpartition(".")[2] for path in names} == {"safetensors", "json"}
    assert names >= {TRAINABLE, EMA, OPTIMIZER, RNG, "state.json", "manifest.json", "policy/policy_preprocessor.json"}
    trained = load_file(folder / TRAINABLE)
    assert len(trained) == 8  # weights and biases of the four heads
    assert all("action_" in name or "time_mlp" in name for name in trained)
    state = read_state(LocalStore(folder.parent), 2)
    assert (state.optimizer_step, state.epoch, state.epoch_samples, state.lanes) == (2, 0, 16, 8)
    assert state.config["seed"] == config.seed
    assert {name.partition(".")[0] for name in state.fingerprints} == {"dataset", "base", "versions"}


def test_averages_begin_where_a_checkpoint_has_none(config, tmp_path):
    without = replace(config, optimizer=replace(config.optimizer, ema_decay=0.0))
    make_finished(without)
    (folder,) = list_checkpoints(config.run_dir)
    into = {name: torch.zeros_like(value) for name, value in load_file(folder / TRAINABLE).items()}
    load_ema(folder, into)
    assert all(torch.equal(into[name], value) for name, value in load_file(folder / TRAINABLE).items())
    with pytest.raises(ValueError, match="has no averaged weights; leave --weights out"):
        load_result(folder, into, "ema")
    assert load_result(folder, into) == "trained"


def test_averages_are_taken_where_there_are_some(config):
    make_finished(config)
    (folder,) = list_checkpoints(config.run_dir)
    into = {name: torch.zeros_like(value) for name, value in load_file(folder / TRAINABLE).items()}
    for weights, file in (("auto", EMA), ("ema", EMA), ("trained", TRAINABLE)):
        load_result(folder, into, weights)
        assert all(torch.equal(into[name], value) for name, value in load_file(folder / file).items())
    assert not torch.equal(load_file(folder / EMA)[next(iter(into))], load_file(folder / TRAINABLE)[next(iter(into))])


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two groups, in another order than the parameters have: the optimizer numbers them its own way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    groups = [{"params": [model[1].weight, model[1].bias], "lr": 0.1}, {"params": list(model[0].parameters())}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def test_moments_find_their_parameters_in_any_grouping(tmp_path):
    from vlatune.checkpoint.state import tensors_to_save

    model, optimizer = make_model()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    files = tensors_to_save(dict(model.named_parameters()), optimizer)
    save_file(dict(files[OPTIMIZER]), tmp_path / OPTIMIZER)
    other, fresh = make_model()
    load_optimizer(tmp_path, dict(other.named_parameters()), fresh)
    for name, parameter in model.named_parameters():
        state, loaded = optimizer.state[parameter], fresh.state[other.get_parameter(name)]
        assert all(torch.equal(state[key], loaded[key]) for key in state)
    assert fresh.param_groups[0]["lr"] == 0.1


def test_other_parameters_or_shapes_are_rejected(config):
    make_finished(config)
    (folder,) = list_checkpoints(config.run_dir)
    stored = load_file(folder / TRAINABLE)
    first = min(stored)
    with pytest.raises(ValueError, match=rf"other parameters than this run \({first}\); is --policy.train another"):
        load_trainable(folder, {name: value for name, value in stored.items() if name != first})
    with pytest.raises(ValueError, match=rf"'{first}' has shape .*here it is \(1,\); is the base model another"):
        load_trainable(folder, stored | {first: torch.zeros(1)})


def draw() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), float(torch.rand(()))]


def test_random_states_come_back_whatever_was_drawn_before():
    draw()  # an odd number of Gaussian draws: half a pair is kept inside the generators
    states = get_rng(CPU)
    expected = draw()
    draw()
    set_rng(states, CPU)
    assert draw() == expected


def test_random_states_are_each_ranks_own(config, tmp_path):
    """Two ranks whose generators stand elsewhere, as rank 0 stores them."""
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(get_rng(CPU))
    with running(config) as run:
        run.step()
        run.checkpointer.save(1, run.loss_sum, 1, gather=lambda mine: [(0.25, 1.0, states[0]), (0.75, 1.0, states[1])])
    folder = config.run_dir / "checkpoints" / "00000001"
    for rank, expected in enumerate(states):
        found = load_rng(folder, rank, 2)
        assert found is not None
        assert all((found[name] == expected[name]).all() for name in expected)
    assert load_rng(folder, 0, 1) is None  # another number of workers: no rank's state fits
    state = read_state(LocalStore(folder.parent), 1)
    assert [state.loss_sum(0, 2), state.loss_sum(1, 2), state.loss_sum(0, 1)] == [0.25, 0.75, 0.5]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: b"no tensors", "header"),
        (lambda stored: {name: value for name, value in stored.items() if name != "numpy"}, "'numpy' is missing"),
        (lambda stored: stored | {"torch": stored["torch"][:, :10]}, "'torch' is"),
        (lambda stored: stored | {"python": stored["python"].astype(np.float32)}, "'python' is"),
        (lambda stored: stored | {"python": stored["python"] | 2**31}, "out of range"),
        (lambda stored: {"python": stored["python"]}, "torch"),
    ],
)
def test_damaged_random_states_are_named(tmp_path, change, reason):
    """The manifest fits: whoever can write the folder can write the manifest, too."""
    stored = stack_rng([get_rng(CPU)])
    made = change(stored)
    (tmp_path / RNG).write_bytes(made) if isinstance(made, bytes) else save_numpy(made, tmp_path / RNG)
    with pytest.raises(ValueError, match=rf"'{tmp_path}/{RNG}' is damaged \(.*{reason}.*restore the checkpoint"):
        load_rng(tmp_path, 0, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda moments: moments | {"0.weight|exp_avg": torch.full((8, 4), math.nan)},
        lambda moments: moments | {"9.weight|exp_avg": torch.zeros(8, 4)},
        lambda moments: moments | {"0.weight|exp_avg": torch.zeros(2)},
        lambda moments: moments | {"0.weight|exp_avg_sq": torch.zeros(8, 4, dtype=torch.int64)},
        lambda moments: moments | {"0.weight|step": torch.zeros(8, 4)},
        lambda moments: {name: value for name, value in moments.items() if name != "0.weight|exp_avg"},
    ],
)
def test_invalid_moments_are_rejected(tmp_path, change):
    """The fused update assumes that they have the parameter's size."""
    from vlatune.checkpoint.state import tensors_to_save

    model, optimizer = make_model()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    files = tensors_to_save(dict(model.named_parameters()), optimizer)
    save_file(change(dict(files[OPTIMIZER])), tmp_path / OPTIMIZER)
    other, fresh = make_model()
    with pytest.raises(ValueError, match=r"optimizer.safetensors.*'[09]\.weight"):
        load_optimizer(tmp_path, dict(other.named_parameters()), fresh)


@pytest.mark.parametrize(
    "value", [torch.zeros(8, 4, dtype=torch.int32), torch.full((8, 4), math.nan), torch.full((8, 4), math.inf)]
)
@pytest.mark.parametrize("file", [TRAINABLE, EMA])
def test_weights_that_are_no_finite_floats_are_rejected(tmp_path, file, value):
    model, _ = make_model()
    trainable = dict(model.named_parameters())
    stored = {name: one.detach().clone() for name, one in trainable.items()}
    save_file(stored, tmp_path / TRAINABLE)
    save_file(stored | {"0.weight": value}, tmp_path / file)
    with pytest.raises(ValueError, match=rf"{file}': '0\.weight'"):
        load_result(tmp_path, trainable)


def test_the_state_is_parsed_as_it_was_written():
    state = TrainState(3, 0, 24, 24, 8, (1.25, 0.1), 2, {"seed": 1}, {"base.weights": "ab"}, BINDING)
    assert parse_state(state_bytes(state), "here", 3) == state
    with pytest.raises(ValueError, match=r"checkpoint here: state\.json: optimizer_step is 3"):
        parse_state(state_bytes(state), "here", 4)


def test_another_format_is_rejected():
    with pytest.raises(ValueError, match=r"checkpoint here: state\.json: format 99"):
        parse_state(b'{"format": 99}', "here", 1)
    with pytest.raises(ValueError, match="surprise"):
        parse_state(b'{"format": 2, "surprise": 1}', "here", 1)
