"""Make a run folder without training."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any


def run_config(dataset: Path, base: Path, run: Path) -> Any:
    from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig

    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset),), run_length=4, window_rows=8),
        policy=PolicyConfig(path=str(base), train="heads"),
        output_dir=str(run),
        steps=20,
        batch_size=4,
    )


def make_run(dataset: Path, base: Path, run: Path) -> None:
    """Write a run folder with a checkpoint of step 2 whose tensor file is empty."""
    from vlatune.checkpoint.state_file import STATE, TrainState, state_bytes
    from vlatune.checkpoint.store import write_checkpoint
    from vlatune.config.settings import to_json
    from vlatune.export.policy_files import POLICY_FOLDER
    from vlatune.run.sinks import MetricsFile
    from vlatune.train.driver.resume_rules import find_resume_point, open_run

    config = run_config(dataset, base, run)
    start = find_resume_point(config, say=lambda _: None)
    open_run(config)
    order = start.setup.order
    state = TrainState(
        optimizer_step=2,
        epoch=0,
        epoch_samples=2 * order.global_batch,
        samples_seen=2 * order.global_batch,
        lanes=order.lanes,
        loss_sums=(0.5,),
        loss_count=1,
        config=to_json(replace(config, output_dir="elsewhere")),
        fingerprints=start.fingerprints,
        binding=start.setup.binding,
    )
    policy = {f"{POLICY_FOLDER}/{name}": data for name, data in start.policy_files.items()}
    files = {STATE: state_bytes(state), "trainable.safetensors": b"\2\0\0\0\0\0\0\0{}", **policy}
    write_checkpoint(start.store, 2, {name: partial(_write, data) for name, data in files.items()})
    metrics = MetricsFile(run / "metrics.jsonl")
    metrics.append({"optimizer_step": 2, "loss": 0.5})
    metrics.close()


def _write(data: bytes, path: Path) -> None:
    path.write_bytes(data)
