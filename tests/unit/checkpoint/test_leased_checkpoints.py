"""A worker whose driver has lost the lease publishes and removes nothing."""

import time
from dataclasses import replace

import pytest
from small_run import running, small_config

from vlatune.checkpoint.store import open_store
from vlatune.config.settings import RunConfig
from vlatune.errors import RunStoppedError
from vlatune.storage.lease import EXPIRY_S, Lease, lease_file
from vlatune.train.driver.resume_rules import run_lease
from vlatune.train.failures import root_cause


def save_before_and_after(config: RunConfig, lease_id: str, other: Lease) -> None:
    with running(config, lease_id) as run:
        run.step()
        run.save()
        run.checkpointer.finish()
        other.acquire()
        run.step()
        run.save()


def test_nothing_is_written_after_another_driver_took_over(dataset_v3, small_base, tmp_path):
    shared = str(tmp_path / "shared")
    config = replace(small_config(dataset_v3, small_base, tmp_path / "run"), storage_path=shared, keep_checkpoints=1)
    store = open_store(config.run_dir, shared)
    with run_lease(config) as lease:
        assert lease is not None
        other = Lease(lease_file(config.run_dir, shared), now=lambda: time.time() + 2 * EXPIRY_S)
        with pytest.raises(RuntimeError) as error:
            save_before_and_after(config, lease.id, other)
        assert isinstance(root_cause(error.value), RunStoppedError)
        assert store.steps() == [1]
        begun = store.begin(2)  # by the other driver's worker
        with pytest.raises(RunStoppedError), running(config, lease.id):
            pass
        assert begun.is_dir()
    other.check()
