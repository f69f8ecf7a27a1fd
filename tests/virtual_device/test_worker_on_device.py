"""The real worker on the virtual device: losses as on the CPU, no violations, no host synchronisation inside an update."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parity.policies.flow_parity import make_case
from run_copies import copy_run

from virtual_device.conftest import run_program
from vlatune.checkpoint.store import list_checkpoints
from vlatune.checks.device_memory import plan_footprint
from vlatune.config.settings import DatasetConfig, OptimizerConfig, PolicyConfig, RunConfig, to_json
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.transforms import apply_all
from vlatune.evaluate.held_out import read_held_out
from vlatune.policies.base import ModuleOptions
from vlatune.registry import get_adapter, get_policy_info
from vlatune.run.sinks import read_jsonl
from vlatune.run_setup import make_setup
from vlatune.train.driver.tiny_base import fit_datasets

KINDS = ("pi05", "pi0", "smolvla", "act", "diffusion")
ROUNDING = 1e-6
"""Relative, in float32: norms over many tensors are summed in another order."""


@pytest.fixture(scope="module")
def config(dataset_v3: Path, small_base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),), eval_split=0.2, run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(small_base), train="expert"),
        optimizer=OptimizerConfig(lr=1e-3, ema_decay=0.9),
        output_dir=str(tmp_path_factory.mktemp("runs") / "run"),
        steps=4,
        batch_size=2,
        grad_accum=2,
        log_freq=1,
        save_freq=3,
        eval_freq=2,
        eval_samples=6,
        save_every_s=0.0,
    )


def request(config: RunConfig, device: str, name: str, **more: Any) -> dict[str, Any]:
    folder = Path(config.output_dir).with_name(name)  # pyright: ignore[reportArgumentType]
    return {"config": to_json(replace(config, output_dir=str(folder))), "device": device, **more}


def assert_equal_runs(ours: dict[str, Any], theirs: dict[str, Any], rel: float = ROUNDING) -> None:
    for file in ("metrics.jsonl", "validation.jsonl"):
        mine, other = (read_jsonl(Path(one["config"]["output_dir"]) / file) for one in (ours, theirs))
        assert len(mine) == len(other) > 0
        if "loss" in mine[0]:  # before an update, nothing but the attention kernel may differ, whatever the dtype
            assert mine[0]["loss"] == pytest.approx(other[0]["loss"], rel=ROUNDING)
        for key in {"optimizer_step", "loss", "grad_norm", "val_loss", "val_action_error"} & set(mine[0]):
            assert [line[key] for line in mine] == pytest.approx([line[key] for line in other], rel=rel)


def assert_clean(report: dict[str, Any]) -> None:
    assert report["violations"] == []
    assert report["host_syncs"]  # of log lines and saves; those inside an update end the run
    assert report["peak_bytes"] > 0


def test_a_run_is_equal_to_the_cpus_also_after_a_resume(virtual_library, config):
    """Train with accumulation, averaged weights, validation, checkpoints, and prompts of several lengths."""
    cpu, virtual = request(config, "cpu", "cpu"), request(config, "virtual:1", "virtual")
    full = request(config, "virtual:1", "full") | {"free_bytes": 10**7}
    *reports, stopped = run_program(
        "run", virtual_library, json.dumps([cpu, virtual | {"stop_after": 1}, virtual, full])
    )
    assert_equal_runs(virtual, cpu)
    for report in reports[1:]:
        assert_clean(report)
    assert {"--batch_size=1", "--grad_accum=4"} <= set(stopped["stopped"].replace(",", " ").split())


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_kept_prefix_is_written_and_read_on_the_device(virtual_library, config, dtype, tmp_path):
    """Rows that the device computed are read back to the bit: by the second epoch, after a resume, and by another run."""
    given = replace(
        config,
        policy=replace(config.policy, keep_prefix="true", dtype=dtype),
        dataset=replace(config.dataset, cache=str(tmp_path / "store")),
        output_dir=str(tmp_path / "run"),
        batch_size=8,
        steps=8,
    )
    without = replace(given, dataset=replace(given.dataset, cache=str(tmp_path / "other"), cache_bytes=1))
    cpu, computed = request(given, "cpu", "cpu"), request(without, "virtual:1", "computed")
    filling, warm = request(given, "virtual:1", "filling"), request(given, "virtual:1", "warm")
    reports = run_program(
        "run", virtual_library, json.dumps([cpu, computed, filling | {"stop_after": 5}, filling, warm])
    )
    for report in reports[1:]:
        assert_clean(report)
    shares = {
        name: [line["kept_prefix_share"] for line in read_jsonl(tmp_path / name / "metrics.jsonl")]
        for name in ("computed", "filling", "warm")
    }
    assert set(shares["computed"]) == {0.0}
    assert 0.0 == shares["filling"][0] < shares["filling"][-1]
    assert set(shares["warm"]) == {1.0}
    for other in (computed, filling):
        assert_equal_runs(warm, other, rel=0.0)
    assert_equal_runs(warm, cpu, rel=ROUNDING if dtype == "float32" else 2.0**-8)


@pytest.mark.parametrize("kind", ["pi05", pytest.param("smolvla", marks=pytest.mark.slow)])
def test_the_frozen_part_leaves_the_device_once_all_is_kept(virtual_library, config, dataset_v3, kind, tmp_path):
    """It returns for validations, and if rows are lost; losses stay the same to the bit."""
    base, fit = tmp_path / "base", fit_datasets((load_meta(str(dataset_v3)),), seed=3, max_dims=100)
    get_adapter(kind).make_base(base, replace(fit, horizon=5, image_size=48), small=True, place=base)
    given = replace(
        config,
        policy=replace(config.policy, type=kind, path=str(base), keep_prefix="true", keep_prefix_dtype="int8"),
        dataset=replace(config.dataset, cache=str(tmp_path / "store"), drop_last=False),
        output_dir=str(tmp_path / "run"),
        batch_size=8,
        steps=8,
    )
    setup, options = make_setup(given), ModuleOptions.of(given.policy)
    module: Any = get_adapter(kind).load_module(setup.policy, setup.binding, options)
    frozen = sum(one.nbytes for part in module.prefix_modules() for one in part.parameters())
    filling, warm, lost = (request(given, "virtual:1", name) for name in ("filling", "warm", "lost"))
    reports = run_program(
        "run", virtual_library, json.dumps([filling, warm, lost | {"delete": [str(tmp_path / "store"), 8]}])
    )
    for report in reports:
        assert_clean(report)
    assert_equal_runs(warm, filling, rel=0.0)
    assert_equal_runs(lost, filling, rel=0.0)
    validation = read_jsonl(tmp_path / "warm" / "validation.jsonl")
    assert len(validation) == 4
    for line in validation:
        assert 0 < abs(line["val_loss_int8"] / line["val_loss"] - 1) < 1e-2
    # The fifth update needs the first row that is lost.
    assert reports[2]["frozen_bytes"] == [frozen, 0, 0, 0, 0, frozen, frozen, frozen]
    assert reports[1]["end_bytes"] + 0.9 * frozen < reports[2]["end_bytes"]


def run_workers(
    library: Path, folder: Path, runs: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]] = (), *, count: int = 2
) -> list[list[Any]]:
    """Run each request with so many workers on two devices; return the reports of each rank. Rank 0 runs `alone` before."""
    ranks = [
        [
            one | {"device": f"virtual:{rank % 2}", "rank": rank, "rendezvous": str(folder / f"{count}-{number}")}
            for number, one in enumerate(runs)
        ]
        for rank in range(count)
    ]
    words, env = [sys.executable, "-m", "virtual_device.run", str(library)], os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([*words, json.dumps(one)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for one in ([*alone, *ranks[0]], *ranks[1:])
    ]
    reports = []
    for process in processes:
        printed, errors = process.communicate()
        assert process.returncode == 0, errors[-3000:]
        reports.append([json.loads(line) for line in printed.splitlines()][-len(runs) :])
        for report in reports[-1]:
            assert_clean(report)
    return reports


def test_two_workers_exchange_gradients_on_the_device(virtual_library, config, tmp_path):
    """Gradients travel while the next frozen prefix is computed, and exist once, in DDP's buckets; frozen weights stay."""
    config = replace(config, batch_size=2, num_workers=2, eval_freq=0, save_freq=0, steps=3)
    alone = request(replace(config, batch_size=4, num_workers=1), "cpu", "alone")
    runs = [
        request(config, "", "pair"),
        request(config, "", "after", prefix_ahead=False),
        request(replace(config, fsdp=True), "", "sharded"),
        request(replace(config, grad_accum=1), "", "once"),
    ]
    reports = run_workers(virtual_library, tmp_path, runs, [alone])
    lines = [read_jsonl(Path(one["config"]["output_dir"]) / "metrics.jsonl") for one in (alone, *runs[:3])]
    losses, *others = ([line["loss"] for line in one] for one in lines)
    for other in others:
        assert other == pytest.approx(losses, rel=1e-5)
    assert others[0] == others[1]
    setup = make_setup(config)
    module = get_adapter("pi05").load_module(setup.policy, setup.binding, ModuleOptions.of(config.policy))
    trained = 4 * sum(one.numel() for one in module.parameters() if one.requires_grad)
    frozen = sum(one.nbytes for one in module.parameters() if not one.requires_grad)
    for ours, plain, _, single in reports:
        assert (ours["prefixes"], plain["prefixes"]) == ([3, 2, 1, 0], [2, 2, 2, 0])
        assert ours["sent_bytes"]["broadcast"] < trained + frozen // 2
        assert ours["peak_bytes"] < single["peak_bytes"] + trained // 10


@pytest.mark.slow
def test_sharded_workers_save_on_the_device_and_others_resume(virtual_library, config, tmp_path):
    """Saved by two workers, resumed by one with all weights and by four with a quarter each."""
    policy = replace(config.policy, train="full")
    config = replace(config, policy=policy, num_workers=2, steps=20, save_freq=12, eval_freq=10, fsdp=True)
    sharded, plain = request(config, "", "sharded"), request(replace(config, fsdp=False), "", "plain")
    reports = run_workers(virtual_library, tmp_path, [sharded, plain])
    assert_equal_runs(sharded, plain, rel=1e-5)
    for ours, other in reports:
        assert ours["end_bytes"] < 0.6 * other["end_bytes"]
    resumed = []
    for workers in (1, 4):
        folder = copy_run(Path(sharded["config"]["output_dir"]), tmp_path / f"on {workers}")
        shutil.rmtree(list_checkpoints(folder)[-1])
        (folder / "summary.json").unlink()  # as if it had been stopped before its end
        given = replace(config, num_workers=workers, batch_size=4 // workers, fsdp=workers > 1, resume=True)
        resumed.append(request(replace(given, output_dir=str(folder)), "virtual:0", folder.name))
    run_program("run", virtual_library, json.dumps(resumed[:1]))
    run_workers(virtual_library, tmp_path, resumed[1:], count=4)
    for one in resumed:
        assert_equal_runs(one, sharded, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_policy_and_mode_is_equal_to_the_cpus(virtual_library, dataset_v3, config, kind, dtype, tmp_path):
    info = get_policy_info(kind)
    if dtype != "float32" and "dtype" not in info.settings:
        pytest.skip(f"{kind} has no --policy.dtype")
    base, fit = tmp_path / "base", fit_datasets((load_meta(str(dataset_v3)),), seed=3, max_dims=100)
    get_adapter(kind).make_base(base, replace(fit, horizon=5, image_size=48), small=True, place=base)
    pairs = []
    for train in info.train_modes:
        policy = PolicyConfig(path=str(base), type=kind, train=train, dtype=dtype if "dtype" in info.settings else None)
        given = replace(config, policy=policy, steps=2, output_dir=str(tmp_path / "run"), save_freq=2)
        pairs.append([request(given, device, f"{train}-{device[:3]}") for device in ("cpu", "virtual:0")])
    reports = run_program("run", virtual_library, json.dumps([one for pair in pairs for one in pair]))
    for (cpu, virtual), report in zip(pairs, reports[1::2], strict=True):
        assert_clean(report)
        assert_equal_runs(virtual, cpu, rel=ROUNDING if dtype == "float32" else 2.0**-8)


@pytest.mark.slow
def test_loading_takes_the_model_and_one_tensor(virtual_library, dataset_v3, tmp_path):
    named = [
        word
        for kind in ("pi05", "pi0", "smolvla")
        for word in (kind, str(make_case(kind, tmp_path / kind, dataset_v3).base))
    ]
    for found in run_program("load", virtual_library, str(dataset_v3), *named):
        assert found["host"] <= 2 * found["largest"] + found["buffers"]
        assert found["model"] <= found["device"] <= found["model"] + found["largest"]


@pytest.mark.slow
def test_the_estimated_memory_is_that_of_the_device(virtual_library, config, tmp_path):
    requests, estimates = [], []
    for train in ("heads", "expert", "lora", "full"):
        given = replace(
            config,
            policy=replace(config.policy, train=train),
            output_dir=str(tmp_path / "run"),
            steps=2,
            eval_freq=0,
            grad_accum=1,
            batch_size=4,
        )
        setup = make_setup(given)
        columns = apply_all(setup.eval_transforms(0), read_held_out(setup, 2))
        footprint = plan_footprint(setup.adapter, setup, ModuleOptions.of(given.policy), columns)
        assert footprint
        estimates.append(footprint.needed(4, ema=True, cuda=False))
        requests.append(request(given, "virtual:0", train))
    reports = run_program("run", virtual_library, json.dumps(requests))
    for estimate, report in zip(estimates, reports, strict=True):
        assert 0.9 < estimate / report["peak_bytes"] < 1.3
