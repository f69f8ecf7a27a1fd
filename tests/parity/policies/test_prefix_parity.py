"""A kept prefix gives the loss and gradients of computing it, and the same bits however much of it is kept."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parity.policies.flow_parity import (
    GRADIENT_RTOL,
    LOSS_RTOL,
    SAMPLES,
    Case,
    distance,
    gradients,
    worst_distance,
)

from benchmarks.step.host_sync import HostSyncSpy
from vlatune.batch import IDS, PREFIX, TOKEN_MASK, TOKENS, Columns
from vlatune.data.frames.cache import HEADER_BYTES, CacheSettings
from vlatune.data.frames.prefix_store import PrefixSettings
from vlatune.data.transforms import cut_prompts
from vlatune.feed.ray_blocks import HAS_IMAGES
from vlatune.policies.base import ModuleOptions, require_kept
from vlatune.registry import get_policy_info
from vlatune.train.worker.kept_prefix import KeptPrefix

CPU = torch.device("cpu")
MODES = dict.fromkeys(("pi05", "pi0", "smolvla"), ("heads", "expert"))
KINDS = [(kind, train) for kind, modes in MODES.items() for train in modes]
TOLERANCES = {"float32": (LOSS_RTOL, GRADIENT_RTOL), "bfloat16": (2.0**-8, 2.0**-5)}


def open_kept(
    case: Case, folder: Path, train: str, dtype: str = "float32", max_bytes: int = 1 << 30, stored: str = "same"
) -> KeptPrefix:
    options = ModuleOptions(train=train, dtype=dtype)
    layout = case.setup.adapter.kept_prefix(case.setup.policy, case.setup.binding, options)
    layout = replace(layout, stored=stored)
    cameras = tuple(name for _, name in case.setup.binding.cameras)
    settings = PrefixSettings(CacheSettings(str(folder), max_bytes, 0, time.time()), layout, (b"test",), cameras)
    return KeptPrefix(settings, case.setup.data_plan, CPU, 1, np.empty)


def columns_of(case: Case) -> Columns:
    return {key: values.numpy().copy() for key, values in case.samples.items()}


def step(case: Case, module, folder: Path, train: str, dtype: str = "float32", change=None, **options):
    """Train on the batch through the store; return the loss, the gradients and the share of kept rows."""
    kept = open_kept(case, folder, train, dtype, **options)
    columns = columns_of(case)
    if change:
        change(columns)
    (columns,) = kept.read(iter([columns]))
    trimmed = cut_prompts(columns)
    tensors = {
        key: torch.from_numpy(np.ascontiguousarray(one)) for key, one in trimmed.items() if key not in (*IDS, "slot")
    }
    batch = kept.complete(tensors, module.compute_kept)
    assert not any(name in batch for _, name in case.setup.binding.cameras)
    loss = module(batch).loss
    found = gradients(module, loss)
    kept.close()
    return loss.detach(), found, kept.take_share()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("kind", "train"), KINDS)
def test_loss_and_gradients_equal_those_of_images(cases, tmp_path, kind: str, train: str, dtype: str) -> None:
    case = cases(kind)
    module = case.load(train, dtype, flow_samples=SAMPLES)
    expected = module(case.samples).loss
    expected_gradients = gradients(module, expected)
    computed, computed_gradients, share = step(case, module, tmp_path, train, dtype)
    assert share == 0
    loss_rtol, gradient_rtol = TOLERANCES[dtype]
    assert distance(computed, expected) <= loss_rtol
    assert worst_distance(computed_gradients, expected_gradients)[0] <= gradient_rtol
    read, read_gradients, share = step(case, module, tmp_path, train, dtype)
    assert share == 1
    assert torch.equal(read, computed)
    assert all(torch.equal(one, computed_gradients[name]) for name, one in read_gradients.items())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", MODES)
def test_int8_rows_are_small_and_the_same_whether_computed_or_read(cases, tmp_path, kind: str, dtype: str) -> None:
    case = cases(kind)
    module = case.load("expert", dtype, flow_samples=SAMPLES)
    exact, exact_gradients, _ = step(case, module, tmp_path / "exact", "expert", dtype)
    computed, computed_gradients, share = step(case, module, tmp_path / "int8", "expert", dtype, stored="int8")
    read, read_gradients, read_share = step(case, module, tmp_path / "int8", "expert", dtype, stored="int8")
    assert (share, read_share) == (0, 1)
    assert torch.equal(read, computed)
    assert all(torch.equal(one, computed_gradients[name]) for name, one in read_gradients.items())
    sizes = [
        sum(one.stat().st_size - HEADER_BYTES for one in (tmp_path / name).glob("*.part")) for name in ("int8", "exact")
    ]
    assert sizes[0] / sizes[1] <= (0.58 if dtype == "bfloat16" else 0.29)
    assert distance(computed, exact) <= (2.0**-7 if dtype == "bfloat16" else 4e-3)
    assert 0 < worst_distance(computed_gradients, exact_gradients)[0] <= 0.1


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("lost", [(0,), (3,), (1, 2), (0, 2, 3)], ids=str)
def test_partly_kept_rows_give_the_same_bits(cases, tmp_path, kind: str, lost: tuple[int, ...]) -> None:
    """Lost rows are computed from their images, which the read task had left out."""
    case = cases(kind)
    module = case.load("expert", flow_samples=SAMPLES)
    empty, empty_gradients, _ = step(case, module, tmp_path, "expert")
    store = open_kept(case, tmp_path, "expert")._store
    for row, key in enumerate(store.keys(columns_of(case))):
        if row in lost:
            (tmp_path / key.part.name).unlink()

    def without_images(columns: Columns) -> None:
        columns[HAS_IMAGES] = np.zeros(len(columns[TOKENS]), bool)
        for _, camera in case.setup.binding.cameras:
            columns[camera][:] = 0

    partly, partly_gradients, share = step(case, module, tmp_path, "expert", change=without_images)
    assert share == 1 - len(lost) / 4
    assert torch.equal(partly, empty)
    assert all(torch.equal(one, empty_gradients[name]) for name, one in partly_gradients.items())


def test_damaged_rows_and_rows_of_another_prompt_are_computed(cases, tmp_path) -> None:
    case = cases("pi05")
    module = case.load("expert", flow_samples=SAMPLES)
    expected, _, _ = step(case, module, tmp_path, "expert")
    one, two, three, _ = sorted(tmp_path.rglob("*.part"))
    data = bytearray(one.read_bytes())
    data[-1] ^= 1
    one.write_bytes(data)
    three.write_bytes(two.read_bytes())
    assert torch.equal(step(case, module, tmp_path, "expert")[0], expected)

    def other_prompt(columns: Columns) -> None:
        columns[TOKENS][0, 0] += 1

    changed, _, share = step(case, module, tmp_path, "expert", change=other_prompt)
    assert share == 0.75
    assert not torch.equal(changed, expected)
    shutil.rmtree(tmp_path)
    assert torch.equal(step(case, module, tmp_path, "expert", change=other_prompt)[0], changed)


def test_a_store_without_room_or_folder_keeps_nothing(cases, tmp_path) -> None:
    case = cases("pi05")
    module = case.load("expert", flow_samples=SAMPLES)
    expected, _, _ = step(case, module, tmp_path / "store", "expert")
    (tmp_path / "file").write_bytes(b"")
    for folder, max_bytes in ((tmp_path / "full", 4096), (tmp_path / "file", 1 << 30)):
        for _ in range(2):
            loss, _, share = step(case, module, folder, "expert", max_bytes=max_bytes)
            assert (share, torch.equal(loss, expected)) == (0, True)
    assert not list((tmp_path / "full").rglob("*.part"))


@pytest.mark.parametrize("kind", MODES)
def test_a_step_with_a_kept_prefix_has_no_host_sync(cases, tmp_path, kind: str) -> None:
    case = cases(kind)
    module = case.load("expert", flow_samples=SAMPLES)
    prefix = module.compute_kept(case.samples)
    cameras = {name for _, name in case.setup.binding.cameras}
    batch = {key: one for key, one in case.samples.items() if key not in cameras} | {PREFIX: prefix}
    with HostSyncSpy(resident=[*module.parameters(), *module.buffers(), *batch.values()]) as spy:
        module(batch).loss.backward()
    assert spy.table() == []


@pytest.mark.parametrize("kind", MODES)
def test_the_layout_is_that_of_the_module(cases, kind: str) -> None:
    case = cases(kind)
    for train in MODES[kind]:
        for dtype in TOLERANCES:
            options = ModuleOptions(train=train, dtype=dtype)
            layout = case.setup.adapter.kept_prefix(case.setup.policy, case.setup.binding, options)
            row = case.load(train, dtype, flow_samples=SAMPLES).compute_kept(case.samples)[0]
            prompt = case.samples[TOKEN_MASK].shape[1] if layout.max_prompt_tokens else 0
            assert row.shape == (layout.image_tokens + prompt, layout.width)
            assert (str(row.dtype), row.nbytes) == (
                f"torch.{layout.dtype}",
                (layout.image_tokens + prompt) * layout.token_bytes,
            )
    info, setup = get_policy_info(kind), case.setup
    with pytest.raises(ValueError, match=r"--policy.train=full .*--policy.train=expert"):
        require_kept(setup.adapter, setup.policy, setup.binding, info, replace(options, train="full"))
