"""Who may start in a run folder, and who goes on."""

import json
from dataclasses import replace

import pytest
from summaries import summary

from vlatune.config import DatasetConfig, PolicyConfig, RunConfig
from vlatune.report.run_folder import RunFolder
from vlatune.report.summary import write_summary
from vlatune.train.driver.resume_rules import only_one, open_run


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


def test_a_new_run_records_its_config(config):
    folder = open_run(config)
    assert json.loads((folder.path / "config.json").read_text())["steps"] == 10


def test_a_finished_run_is_refused(config):
    open_run(config)
    finish(config)
    with pytest.raises(ValueError, match="already holds a finished run of 10 steps"):
        open_run(config)
    with pytest.raises(ValueError, match="already holds a finished run"):
        open_run(replace(config, resume=True))


def test_a_finished_run_goes_on_with_more_steps(config):
    open_run(config)
    finish(config)
    folder = open_run(replace(config, resume=True, steps=20))
    assert folder.summary() is None


def test_the_same_command_goes_on_after_a_crash(config):
    open_run(config)
    open_run(config)
    open_run(replace(config, resume=True))


def test_workers_may_change_while_the_global_batch_stays(config):
    open_run(config)
    open_run(replace(config, num_workers=2, batch_size=4))
    with pytest.raises(ValueError, match=r"batch_size \* grad_accum \* num_workers, was 8, now 16"):
        open_run(replace(config, num_workers=2, batch_size=8))


def test_other_settings_are_refused_with_what_differs(config):
    open_run(config)
    with pytest.raises(ValueError, match="--seed was 1000, now 7"):
        open_run(replace(config, seed=7))
    with pytest.raises(ValueError, match=r"--policy\.train was 'expert', now 'full'"):
        open_run(replace(config, policy=PolicyConfig(path="base", train="full")))


def test_resume_without_a_run_is_refused(config):
    with pytest.raises(ValueError, match="there is no run in"):
        open_run(replace(config, resume=True))


def test_a_folder_with_other_things_is_refused(config):
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "thesis.tex").write_text("do not touch")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        open_run(config)


def test_only_one_process_at_a_time(config):
    folder = RunFolder(config.run_dir)
    with only_one(folder), pytest.raises(ValueError, match="in use by another process"), only_one(folder):
        pass


def test_logs_of_earlier_attempts_stay(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    for _ in range(3):
        folder.new_log("failure").touch()
    folder.new_log("hang").touch()
    assert sorted(file.name for file in folder.logs.iterdir()) == [
        *(f"failure-{number}.txt" for number in range(3)),
        "hang-0.txt",
    ]
