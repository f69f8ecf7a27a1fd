"""One of two training processes over gloo: `python two_workers.py RANK FOLDER`. Run by test_two_workers.py.

Three updates of two micro-steps on its half of the data, then one that is NaN on rank 1 alone, then one more good one.
Leaves weights.safetensors (after three), stopped.safetensors (after five) and message.txt in FOLDER/RANK.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from regression import make_batches, make_model, make_updater
from safetensors.torch import save_file

from vlatune.errors import RunStoppedError
from vlatune.train.worker.non_finite_guard import NonFiniteWatch
from vlatune.train.worker.optimizer import make_parallel

UPDATES, MICRO_STEPS, ROWS, WORKERS = 3, 2, 4, 2


def main(rank: int, folder: Path) -> None:
    (folder / str(rank)).mkdir()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORKERS)
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
    dist.destroy_process_group()


def look(watch: NonFiniteWatch, skipped: float, file: Path) -> None:
    def gather(mine):
        everyone = [None] * WORKERS
        dist.all_gather_object(everyone, mine)
        return everyone

    try:
        watch.look(skipped, UPDATES + 2, gather)
    except RunStoppedError as error:
        file.write_text(str(error))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
