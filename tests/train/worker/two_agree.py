"""One of two processes that agree over gloo: `python two_agree.py RANK FOLDER`. Run by test_collectives.py.

Rank 1 asks for a save after step 3 and a stop after step 6. Writes what each step was told to FOLDER/RANK.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from vlatune.pipeline.plan import Share
from vlatune.train.heartbeat import Request
from vlatune.train.worker.collectives import Consensus

REQUESTS = {3: Request.SAVE, 6: Request.STOP}


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    consensus, told, step = Consensus(Share(rank, 2)), [], 0
    while not told or told[-1] != Request.STOP:
        step += 1
        told.append(int(consensus.take()))
        consensus.give(REQUESTS.get(step, Request.NOTHING) if rank == 1 else Request.NOTHING)
    everyone = consensus.gather({"rank": rank})
    (folder / f"{rank}.json").write_text(json.dumps({"told": told, "everyone": everyone}))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
