"""Runs that may start in a folder, and runs that resume."""

import errno
import fcntl
from dataclasses import replace

import pytest
from summaries import summary

from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.run.run_folder import new_log
from vlatune.run.summary import read_summary, write_summary
from vlatune.train.driver.resume_rules import check_run, open_run, run_lease, run_lock


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=("data",)),
        policy=PolicyConfig(path="base"),
        output_dir=str(tmp_path / "run"),
        steps=10,
    )


def finish(config: RunConfig) -> None:
    write_summary(config.run_dir, summary(optimizer_steps=config.steps))


def test_a_finished_run_is_rejected(config):
    open_run(config)
    finish(config)
    with pytest.raises(ValueError, match="already holds a finished run of 10 steps"):
        open_run(config)
    with pytest.raises(ValueError, match="already holds a finished run"):
        open_run(replace(config, resume=True))


def test_a_finished_run_resumes_with_more_steps(config):
    open_run(config)
    finish(config)
    open_run(replace(config, resume=True, steps=20))
    assert read_summary(config.run_dir) is None


def test_resume_without_a_run_is_rejected(config):
    with pytest.raises(ValueError, match="there is no run in"):
        open_run(replace(config, resume=True))


def test_a_folder_with_other_files_is_rejected(config):
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "thesis.tex").write_text("do not touch")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        open_run(config)


def test_only_one_process_at_a_time(config):
    folder = config.run_dir
    with run_lock(folder), pytest.raises(ValueError, match="in use by another process"), run_lock(folder):
        pass


def test_folder_that_cannot_be_locked_is_not_called_in_use(config, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ValueError, match=r"No locks available.*--output_dir"), run_lock(config.run_dir):
        pass


def test_lease_in_the_run_folder_does_not_stop_the_next_start(config):
    """Left by a process that was killed before it wrote the config, with the storage beside the run."""
    stored = replace(config, storage_path=str(config.run_dir.parent))
    with run_lock(config.run_dir), run_lease(stored) as lease:
        assert lease is not None
        check_run(stored)
    check_run(stored)


def test_only_one_driver_at_a_time_writes_to_the_storage_path(config, tmp_path):
    """Run folders on two machines have the same name and different locks."""
    shared = str(tmp_path / "shared")
    here, there = (
        replace(config, output_dir=str(tmp_path / name / "run"), storage_path=shared) for name in ("here", "there")
    )
    with run_lease(here) as lease, pytest.raises(ValueError, match="in use by process"), run_lease(there):
        pass
    assert lease is not None
    assert lease.lost is None
    with run_lease(there), run_lease(config) as none:  # without a storage path there is no lease
        assert none is None


def test_logs_of_earlier_attempts_stay(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for _ in range(3):
        new_log(tmp_path, "failure").touch()
    new_log(tmp_path, "hang").touch()
    assert sorted(file.name for file in logs.iterdir()) == [
        *(f"failure-{number}.txt" for number in range(3)),
        "hang-0.txt",
    ]
