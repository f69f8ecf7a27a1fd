"""Run workers on the virtual device: `python -m virtual_device.run LIBRARY REQUESTS`.

REQUESTS is a JSON list of runs: `config`, `device` (`cpu` or `virtual:0`), for several workers `rank` and `rendezvous`, `stop_after`
(steps), `free_bytes` of the device, `delete` (a folder, and the number of the micro-batch before which it is deleted), and
`prefix_ahead`. Prints a line of JSON per run: what the device has reported, and how many
prefixes were computed before each optimizer step. Host synchronisations inside updates are errors.
"""

import json
import shutil
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from local_runs import NoDriver, RequestAfter, make_job, make_worker
from torch.nn.attention import SDPBackend, sdpa_kernel

from virtual_device.backend import VirtualDevice
from virtual_device.process_group import register, sent_bytes
from vlatune.batch import Columns
from vlatune.config.flags import config_from_dict
from vlatune.config.settings import RunConfig
from vlatune.errors import RunStoppedError
from vlatune.feed.plan import Share
from vlatune.train.driver.resume_rules import find_resume_point, open_run
from vlatune.train.failures import full_device_is_final
from vlatune.train.heartbeat import Request
from vlatune.train.prefix_choice import choose_prefix


def run(virtual: VirtualDevice, request: dict[str, Any]) -> dict[str, Any]:
    config, device = config_from_dict(RunConfig, request["config"], "request"), torch.device(request["device"])
    rank = request.get("rank", 0)
    virtual.clear()
    with full_device_is_final(config), ExitStack() as stack:
        if (
            device.type == "cpu"
        ):  # torch has fused attention for the CPU, and only the generic one for the virtual device
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        else:
            torch.accelerator.set_device_index(device.index)
        start = find_resume_point(config, say=lambda _: None)
        kept = choose_prefix(config, start.setup, start.fingerprints, on_gpu=True).settings
        start = replace(start, setup=replace(start.setup, kept=kept))
        if rank == 0:
            open_run(config)
        if config.num_workers > 1:
            backend = "gloo" if device.type == "cpu" else "virtual"
            place = f"file://{request['rendezvous']}"
            dist.init_process_group(backend, init_method=place, rank=rank, world_size=config.num_workers)
            stack.callback(dist.destroy_process_group)
        job = make_job(config, start)
        if config.num_workers > 1:
            dist.all_reduce(torch.zeros(1, device=device))  # rank 0 writes records after all have read those there are
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        if "free_bytes" in request:
            virtual.set_cap(before + request["free_bytes"], device.index)
            stack.callback(virtual.set_cap, 1 << 40, device.index)
        driver = RequestAfter(Request.STOP, request["stop_after"]) if "stop_after" in request else NoDriver()
        delete, delete_at = request.get("delete", (None, 0))
        batches, updates, frozen_bytes = count(), count(), []
        prefixes: list[int] = [0]
        sent_bytes.clear()

        def change(columns: Columns) -> Columns:
            if delete and next(batches) == delete_at:
                shutil.rmtree(delete)
            return columns

        share = Share(rank, config.num_workers)
        worker = make_worker(job, share, driver, change, device)
        worker.prefix_ahead &= request.get("prefix_ahead", True)
        update, policy = worker.updater.update, cast(Any, worker.module)
        if worker.prefix_ahead or "prefix_ahead" in request:
            policy.last_prefix_layer.register_forward_pre_hook(lambda *_: prefixes.append(prefixes.pop() + 1))
            worker.optimizer.register_step_pre_hook(lambda *_: prefixes.append(0))

        def guarded(*args: Any) -> Any:
            number = next(updates)
            frozen = [one for part in policy.prefix_modules() for one in part.parameters()] if delete else []
            frozen_bytes.append(sum(one.nbytes for one in frozen if one.device == device))
            # DDP orders its buckets once, before the second update, and tells the other workers. A lost row brings
            # frozen weights back from memory that is not pinned.
            may_sync = (config.num_workers > 1 and number < 2) or (delete and number >= delete_at // config.grad_accum)
            with nullcontext() if may_sync else virtual.no_host_syncs():
                return update(*args)

        worker.updater.update = guarded
        worker.run()
        return {
            "violations": virtual.violations,
            "host_syncs": virtual.host_syncs,
            "peak_bytes": torch.accelerator.max_memory_allocated() - before,
            "end_bytes": torch.accelerator.memory_allocated() - before,
            "frozen_bytes": frozen_bytes,
            "sent_bytes": sent_bytes,
            "prefixes": prefixes,
        }


def main(library: Path, requests: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    virtual = VirtualDevice(library)
    register(virtual)
    for request in requests:
        try:
            report = run(virtual, request)
        except RunStoppedError as error:
            report = {"stopped": str(error)}
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
