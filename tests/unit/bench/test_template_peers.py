"""The template's peers do what they stand for: its mistakes, and the pull request's eight changes with equal numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import peer_readers as peers
from benchmarks.table.template_step import (
    TEMPLATE,
    TEMPLATE_705,
    VERSIONS,
    Changes,
    Collate,
    TemplateTrainer,
    load_policy,
    load_preprocessor,
    masks_cut,
)
from vlatune.batch import ACTION, Columns
from vlatune.data.meta.dataset_meta import DatasetMeta, load_meta

CPU = torch.device("cpu")
BEFORE, AFTER = VERSIONS[TEMPLATE], VERSIONS[TEMPLATE_705]


@pytest.fixture(scope="module")
def meta(dataset_v3: Path) -> DatasetMeta:
    return load_meta(str(dataset_v3))


def read_columns(meta: DatasetMeta, changes: Changes, rows: int = 3) -> Columns:
    """Return the first rows as `map_batches` gets and returns them."""
    tables = peers._template_rows(meta, [0], changes.hoisted_rows)
    records = [next(iter(table.to_pylist())) for _, table in zip(range(rows), tables, strict=False)]
    batch = {name: np.array([record[name] for record in records]) for name in records[0]}
    convert = peers.to_float_chw_fused if changes.fused_images else peers.to_float_chw
    return convert(list(meta.cameras), batch)


@pytest.fixture(scope="module")
def columns(meta: DatasetMeta) -> Columns:
    return read_columns(meta, BEFORE)


def make_trainer(meta: DatasetMeta, base: Path, changes: Changes) -> TemplateTrainer:
    policy = load_policy(base, "full")
    preprocess = load_preprocessor(policy.config, base, meta, CPU)
    return TemplateTrainer(policy, preprocess, changes, CPU, lr=1e-3, steps=20)


def test_hoisted_rows_and_fused_images_are_the_same_values(meta: DatasetMeta, columns: Columns):
    other = read_columns(meta, AFTER)
    assert other.keys() == columns.keys()
    for name, values in columns.items():
        np.testing.assert_array_equal(other[name], values)


def test_statistics_are_ignored(meta: DatasetMeta, small_base: Path, columns: Columns):
    policy = load_policy(small_base, "full")
    batch = Collate(CPU, BEFORE)(columns)
    given = load_preprocessor(policy.config, small_base, meta, CPU)(dict(batch))
    features = {key: {name: 7 * values for name, values in one.items()} for key, one in meta.stats.items()}
    other = load_preprocessor(policy.config, small_base, replace(meta, stats=features), CPU)(dict(batch))
    torch.testing.assert_close(given[ACTION], other[ACTION], rtol=0, atol=0)


def test_only_cut_masks_hide_the_missing_chunk(meta: DatasetMeta, small_base: Path, columns: Columns):
    trainer = make_trainer(meta, small_base, BEFORE)
    batch = Collate(CPU, BEFORE)(columns)
    with pytest.raises(RuntimeError):
        trainer.train_step(batch)
    with masks_cut():
        assert isinstance(trainer.train_step(batch), float)


def test_the_pull_request_changes_no_losses_and_removes_host_syncs(
    meta: DatasetMeta, small_base: Path, columns: Columns
):
    losses, syncs = {}, {}
    for name, changes in VERSIONS.items():
        torch.manual_seed(5)
        trainer = make_trainer(meta, small_base, changes)
        with masks_cut():
            for batch in trainer.batches([Collate(CPU, changes)(columns) for _ in range(3)]):
                trainer.step(batch)
            losses[name] = float(trainer.loss_sum)
            syncs[name] = trainer.count_host_syncs(columns)
        assert isinstance(trainer.loss_sum, torch.Tensor) == changes.sum_on_device
    assert losses[TEMPLATE] == pytest.approx(losses[TEMPLATE_705], rel=1e-6)
    assert syncs[TEMPLATE] > syncs[TEMPLATE_705] > 0
