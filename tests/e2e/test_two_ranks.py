"""Two processes over gloo: they learn what one learns, stop together after a NaN on one of them, and agree on requests."""

import json
import multiprocessing
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from regression import join, make_batches, make_model, make_updater
from safetensors.torch import load_file, save_file

from vlatune.errors import RunStoppedError
from vlatune.feed.plan import Share
from vlatune.train.heartbeat import Request
from vlatune.train.worker.collectives import Consensus, mean_and_each
from vlatune.train.worker.non_finite_guard import NonFiniteWatch
from vlatune.train.worker.optimizer import make_parallel

UPDATES, MICRO_STEPS, ROWS, WORKERS = 3, 2, 4, 2
REQUESTS = {3: Request.SAVE, 6: Request.STOP}


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORKERS)
    consensus, model = Consensus(Share(rank, WORKERS)), make_model()
    updater, watch = make_updater(make_parallel(model, accumulates=True)), NonFiniteWatch()
    mine = make_batches(UPDATES * MICRO_STEPS * WORKERS, ROWS)[rank::WORKERS]
    for number in range(UPDATES - 1):
        updater.update(mine[number * MICRO_STEPS :], MICRO_STEPS)
    # Rank 1 begins when rank 0 has ended its backward passes: these do not wait for the exchange.
    store = dist.FileStore(f"{folder}/store", WORKERS)
    if rank == 1:
        store.wait(["begin"], timedelta(seconds=60))
    begin = (lambda: store.set("begin", "")) if rank == 0 else None
    updater.update(mine[(UPDATES - 1) * MICRO_STEPS :], MICRO_STEPS, begin)
    save_file(model.state_dict(), folder / f"weights-{rank}")
    bad = [batch | {"x": batch["x"] / (0.0 if rank == 1 and nth == 0 else 1.0)} for nth, batch in enumerate(mine)]
    for number, batches in enumerate((bad, mine)):
        result = updater.update(batches, MICRO_STEPS)
        ids = [np.array([[rank, 100 * number + nth]]) for nth in range(MICRO_STEPS)]
        watch.record(result.losses, result.grad_norm, ids)
    save_file(model.state_dict(), folder / f"stopped-{rank}")
    with pytest.raises(RunStoppedError) as raised:
        watch.check(float(updater.guard.skipped), UPDATES + 2, consensus.gather)
    agreed = []
    while not agreed or agreed[-1] != Request.STOP:
        agreed.append(int(consensus.take()))
        consensus.give(REQUESTS.get(len(agreed), Request.NOTHING) if rank == 1 else Request.NOTHING)
    means = mean_and_each(torch.tensor([1.0 + rank]), [10.0 + rank], Share(rank, WORKERS), dist.all_reduce)
    (folder / f"{rank}.json").write_text(json.dumps({"error": str(raised.value), "agreed": agreed, "means": means}))
    dist.destroy_process_group()  # its threads must not outlive the interpreter


def test_two_ranks(tmp_path):
    processes = [
        multiprocessing.get_context("spawn").Process(target=run_rank, args=(rank, tmp_path), daemon=True)
        for rank in range(WORKERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=400)
        assert process.exitcode == 0
    model, per_update = make_model(), MICRO_STEPS * WORKERS
    updater, batches = make_updater(model), make_batches(UPDATES * MICRO_STEPS * WORKERS, ROWS)
    for number in range(UPDATES):
        updater.update([join(batches[number * per_update : (number + 1) * per_update])], 1)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORKERS))
    assert first == second
    assert first["agreed"] == [0, 0, 0, Request.SAVE, 0, 0, Request.STOP]
    assert first["means"] == [[1.5], [[10.0], [11.0]]]
    assert f"optimizer step {UPDATES + 1}: the loss is nan (rank 1, micro-step 0)" in first["error"]
    assert "(dataset_index, index): (1, 0);" in first["error"]
    for rank in range(WORKERS):
        before, after = (load_file(tmp_path / f"{name}-{rank}") for name in ("weights", "stopped"))
        for name, value in before.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-6, atol=1e-7)
            assert torch.equal(value, after[name])
