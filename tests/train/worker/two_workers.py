"""Two training processes over gloo, forked from one, so that torch is imported once: `python two_workers.py FOLDER`.

Each leaves in FOLDER/RANK what test_two_workers.py looks at. First they learn: three updates of two micro-steps on their
half of the data, then one that is NaN on rank 1 alone, then one more good one: weights.safetensors (after three),
stopped.safetensors (after five) and message.txt. Then they agree: rank 1 asks for a save after step 3 and a stop after
step 6: agreed.json has what each step was told.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from regression import make_batches, make_model, make_updater
from safetensors.torch import save_file

from vlatune.errors import RunStoppedError
from vlatune.pipeline.plan import Share
from vlatune.train.heartbeat import Request
from vlatune.train.worker.collectives import Consensus
from vlatune.train.worker.non_finite_guard import NonFiniteWatch
from vlatune.train.worker.optimizer import make_parallel

UPDATES, MICRO_STEPS, ROWS, WORKERS = 3, 2, 4, 2
REQUESTS = {3: Request.SAVE, 6: Request.STOP}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for rank in range(WORKERS):
        if os.fork() == 0:
            work(rank, folder)
    statuses = [os.wait()[1] for _ in range(WORKERS)]
    sys.exit(max(statuses) > 0)


def work(rank: int, folder: Path) -> None:
    code = 1
    try:
        (folder / str(rank)).mkdir()
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORKERS)
        learn(rank, folder)
        agree(rank, folder)
        dist.destroy_process_group()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(code)


def learn(rank: int, folder: Path) -> None:
    model = make_model()
    updater, watch = make_updater(make_parallel(model)), NonFiniteWatch()
    mine = make_batches(UPDATES * MICRO_STEPS * WORKERS, ROWS)[rank::WORKERS]
    for number in range(UPDATES):
        updater.update(mine[number * MICRO_STEPS :], MICRO_STEPS)
    save_file(model.state_dict(), folder / str(rank) / "weights.safetensors")
    poisoned = [
        batch | {"x": batch["x"] / (0.0 if rank == 1 and place == 0 else 1.0)} for place, batch in enumerate(mine)
    ]
    for number, batches in enumerate((poisoned, mine)):
        result = updater.update(batches, MICRO_STEPS)
        ids = [np.array([[rank, 100 * number + place]]) for place in range(MICRO_STEPS)]
        watch.remember(result.losses, result.grad_norm, ids)
    save_file(model.state_dict(), folder / str(rank) / "stopped.safetensors")
    look(watch, float(updater.guard.skipped), folder / str(rank) / "message.txt")


def look(watch: NonFiniteWatch, skipped: float, file: Path) -> None:
    def gather(mine):
        everyone = [None] * WORKERS
        dist.all_gather_object(everyone, mine)
        return everyone

    try:
        watch.look(skipped, UPDATES + 2, gather)
    except RunStoppedError as error:
        file.write_text(str(error))


def agree(rank: int, folder: Path) -> None:
    consensus, told, step = Consensus(Share(rank, WORKERS)), [], 0
    while not told or told[-1] != Request.STOP:
        step += 1
        told.append(int(consensus.take()))
        consensus.give(REQUESTS.get(step, Request.NOTHING) if rank == 1 else Request.NOTHING)
    everyone = consensus.gather({"rank": rank})
    (folder / str(rank) / "agreed.json").write_text(json.dumps({"told": told, "everyone": everyone}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
