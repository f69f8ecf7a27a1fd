"""A worker's loop without Ray: real model, real optimizer, real checkpoints; only the feed hands out ready batches."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vlatune.batch import ACTION, Columns
from vlatune.config import DatasetConfig, OptimizerConfig, PolicyConfig, RunConfig, SchedulerConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.errors import RunStoppedError
from vlatune.pipeline.memory import Budget
from vlatune.pipeline.plan import Share
from vlatune.pipeline.transforms import apply_all
from vlatune.report.sinks import read_jsonl
from vlatune.train.driver.resume_rules import find_resume_point
from vlatune.train.heartbeat import Request
from vlatune.train.worker import loop, metrics_logger
from vlatune.train.worker_job import WorkerJob

STEPS, BATCH, MICRO_STEPS = 6, 2, 2
BAD_STEP = 4
EMA_DECAY = 0.5


def frames_of(number: int) -> np.ndarray:
    return np.arange(BATCH) + number % 6


class ReadyBatches:
    """Neighbouring frames of episode 1, batch by batch; those in `poison` are NaN in one action."""

    poison: tuple[int, ...] = ()
    on_batch: Callable[[], object]

    def __init__(self, plan, share, budget, *, first_step: int, last_step: int, coordinator=None, empty=None) -> None:
        self._made = self._make(plan, range(first_step * MICRO_STEPS, last_step * MICRO_STEPS))

    def _make(self, plan, numbers: range) -> Iterator[Columns]:
        for number in numbers:
            self.on_batch()
            frames = frames_of(number)
            rows = read_unit(plan.specs[0], make_unit(plan.metas[0], plan.specs[0], 1, frames, frames))
            columns = apply_all(plan.transforms, rows)
            if number in self.poison:
                columns[ACTION][0, 0, 0] = np.nan
            yield columns

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        return next(self._made)

    def close(self) -> None: ...


class Driver:
    """What the worker hears from the driver: after so many micro-batches, a request."""

    def __init__(self, requests: dict[int, Request] | None) -> None:
        self._requests, self._moves = dict(requests or {}), 0

    def moved(self) -> None:
        self._moves += 1

    def take_request(self) -> Request:
        return self._requests.pop(self._moves, Request.NOTHING)


class NoSpills:
    peak_bytes = 0

    def latest(self) -> SimpleNamespace:
        return SimpleNamespace(spilled_bytes=0, fallback_bytes=0, used_bytes=0)

    close = latest


@pytest.fixture
def config(dataset_v3, small_base, tmp_path) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset_v3),)),
        policy=PolicyConfig(path=str(small_base), train="heads"),
        optimizer=OptimizerConfig(lr=1e-3, ema_decay=EMA_DECAY),
        scheduler=SchedulerConfig(num_warmup_steps=0, num_decay_steps=10),
        output_dir=str(tmp_path / "run"),
        steps=STEPS,
        batch_size=BATCH,
        grad_accum=MICRO_STEPS,
        log_freq=3,
        save_freq=1,
        keep_checkpoints=STEPS,
    )


@pytest.fixture
def run(monkeypatch):
    """config, numbers of bad batches -> run folder; raises what the worker raises."""
    monkeypatch.setattr(loop, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(metrics_logger, "SpillMeter", NoSpills)

    def run(
        config: RunConfig,
        poison: tuple[int, ...] = (),
        requests: dict[int, Request] | None = None,
        on_batch: Callable[[], object] = lambda: None,
    ) -> Path:
        feed = type("Feed", (ReadyBatches,), {"poison": poison, "on_batch": staticmethod(on_batch)})
        monkeypatch.setattr(loop, "Feed", feed)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        start = find_resume_point(config, say=lambda _: None)
        job = WorkerJob(
            config=config,
            setup=start.setup,
            budget=Budget(block_rows=1, block_bytes=1, readers=1, limit_bytes=1),
            run_dir=str(config.run_dir),
            checkpoints=start.plan(config),
            restarts=0,
        )
        loop.work(loop.Worker(job, Share(0, 1), Driver(requests)))
        return config.run_dir

    return run


def checkpoints(run_dir: Path) -> dict[int, Path]:
    return {int(path.name): path for path in sorted((run_dir / "checkpoints").glob("[0-9]*"))}


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.name} {name}": t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()
    }


@pytest.mark.parametrize("save_freq", [1, 3])
def test_nothing_of_a_bad_step_is_ever_saved_or_logged(config, run, save_freq):
    """A save looks before it writes, and so does a log line; here one or the other comes first."""
    bad = (BAD_STEP - 1) * MICRO_STEPS + 1
    config = replace(config, save_freq=save_freq)
    with pytest.raises(
        RunStoppedError, match=rf"optimizer step {BAD_STEP}: the loss is nan \(rank 0, micro-step 1\)"
    ) as raised:
        run(config, poison=(bad,))
    behind = int(load_meta(config.dataset.root[0]).episodes.length[0])
    ids = ", ".join(f"(0, {behind + frame})" for frame in frames_of(bad))
    assert f"(dataset_index, index): {ids};" in str(raised.value)
    saved = checkpoints(config.run_dir)
    assert list(saved) == [step for step in range(1, BAD_STEP) if step % save_freq == 0]
    assert all(tensor.isfinite().all() for path in saved.values() for tensor in tensors(path).values())
    assert [line["optimizer_step"] for line in read_jsonl(config.run_dir / "metrics.jsonl")] == [3]


def test_a_good_run_averages_its_weights_and_says_how_it_was_set_up(config, run):
    run_dir = run(config)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["performance_flags"]["device"] == "cpu"
    assert summary["performance_flags"]["threads"] >= 1
    assert (run_dir / "logs" / "worker.log").read_text().startswith("performance flags: device cpu, threads ")
    saved = [path for _, path in sorted(checkpoints(run_dir).items())]
    for before, after in pairwise(saved):
        old, new = (load_file(path / "ema.safetensors") for path in (before, after))
        trained = load_file(after / "trainable.safetensors")
        for name, average in new.items():
            torch.testing.assert_close(average, old[name].lerp(trained[name], 1 - EMA_DECAY), rtol=1e-6, atol=1e-7)
            assert not torch.equal(average, trained[name])


def test_a_deterministic_run_says_so_and_leaves_the_process_as_it_was(config, run, tmp_path):
    during = []
    plain = run(config)
    chosen = replace(config, deterministic=True, output_dir=str(tmp_path / "deterministic"))
    run_dir = run(chosen, on_batch=lambda: during.append(torch.are_deterministic_algorithms_enabled()))
    assert set(during) == {True}
    assert not torch.are_deterministic_algorithms_enabled()
    assert json.loads((run_dir / "summary.json").read_text())["performance_flags"]["deterministic"] is True
    assert tensors(checkpoints(run_dir)[STEPS]).keys() == tensors(checkpoints(plain)[STEPS]).keys()
    for name, tensor in tensors(checkpoints(run_dir)[STEPS]).items():
        assert torch.equal(tensor, tensors(checkpoints(plain)[STEPS])[name]), name  # a CPU needs no flag


def test_averages_survive_a_restart(config, run, tmp_path):
    whole = run(config)
    stopped = replace(config, output_dir=str(tmp_path / "stopped"))
    with pytest.raises(RunStoppedError):
        run(stopped, poison=(BAD_STEP * MICRO_STEPS,))
    run(stopped)  # the same command, and the samples are good now
    for name in ("ema.safetensors", "trainable.safetensors"):
        assert (checkpoints(stopped.run_dir)[STEPS] / name).read_bytes() == (
            checkpoints(whole)[STEPS] / name
        ).read_bytes()


def test_a_request_of_the_driver_is_carried_out_one_step_later(config, run):
    """SAVE during step 2: a checkpoint after step 3, beside the one at the end; nothing else is different."""
    config = replace(config, save_freq=0, save_every_s=0.0)
    run_dir = run(config, requests={2 * MICRO_STEPS: Request.SAVE})
    assert list(checkpoints(run_dir)) == [3, STEPS]


def test_a_run_that_was_asked_to_stop_saves_and_goes_on_later(config, run, tmp_path):
    whole = run(config)
    asked = replace(config, output_dir=str(tmp_path / "asked"), save_freq=0, save_every_s=0.0)
    run(asked, requests={2 * MICRO_STEPS: Request.STOP})
    assert list(checkpoints(asked.run_dir)) == [3]
    assert not (asked.run_dir / "summary.json").exists()
    run(asked)
    assert tensors(checkpoints(asked.run_dir)[STEPS]).keys() == tensors(checkpoints(whole)[STEPS]).keys()
    for name, tensor in tensors(checkpoints(asked.run_dir)[STEPS]).items():
        assert torch.equal(tensor, tensors(checkpoints(whole)[STEPS])[name]), name
    lines = [read_jsonl(folder / "metrics.jsonl")[-1] for folder in (asked.run_dir, whole)]
    for key in ("loss", "loss_by_task", "loss_by_dim"):
        assert lines[0][key] == lines[1][key], key
    told = [json.loads((folder / "summary.json").read_text())["loss_by_episode"] for folder in (asked.run_dir, whole)]
    assert told[0] == told[1]


def test_losses_are_told_by_action_dim_and_by_episode(config, run):
    """All frames are of episode 1; its samples are those of the second half."""
    run_dir = run(config)
    for line in read_jsonl(run_dir / "metrics.jsonl"):
        assert np.mean(line["loss_by_dim"]) == pytest.approx(line["loss"], rel=1e-5)
        (loss,) = [one for one in line["loss_by_task"].values() if one is not None]
        assert loss == pytest.approx(line["loss"], rel=1e-5)
    (worst,) = json.loads((run_dir / "summary.json").read_text())["loss_by_episode"]
    last = read_jsonl(run_dir / "metrics.jsonl")[-1]  # steps 4 to 6
    assert worst == {"dataset": 0, "episode": 1, "loss": pytest.approx(last["loss"], rel=1e-5), "samples": 12}


def test_a_checkpoint_of_an_older_version_is_gone_on_from(config, run, tmp_path):
    """It has no sums by group, and those by dataset on its page of JSON."""
    whole = run(config)
    older = replace(config, output_dir=str(tmp_path / "older"))
    run(older, requests={4 * MICRO_STEPS: Request.STOP})
    newest = max(checkpoints(older.run_dir).items())[1]
    make_older(newest)
    run(older)
    lines = [read_jsonl(folder / "metrics.jsonl")[-1] for folder in (older.run_dir, whole)]
    assert lines[0]["loss"] == lines[1]["loss"]
    assert len(lines[0]["loss_by_dim"]) == len(lines[1]["loss_by_dim"])


def make_older(checkpoint: Path) -> None:
    """As it was written before losses were told apart by task, dim and episode; its manifest is right."""
    (checkpoint / "losses.safetensors").unlink()
    state = json.loads((checkpoint / "state.json").read_text()) | {"losses_by_dataset": []}
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = {name: manifest["files"][name] for name in manifest["files"] if name != "losses.safetensors"}
    data = (checkpoint / "state.json").read_bytes()
    files["state.json"] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
