"""Checks of the machine or cluster: run folder, memory, reading, storage, resources."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import num_rows
from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import open_store
from vlatune.checks import device_memory, run_cost
from vlatune.checks.case import Case
from vlatune.checks.device_memory import GB, GPU_SIZES
from vlatune.data.reader import read_unit
from vlatune.data.transforms import apply_all
from vlatune.feed.plan import Share, make_units, plan_steps
from vlatune.feed.sizing import CORE_FLOPS, Sizing, plan_on_nodes, usable_ram_bytes
from vlatune.findings import Finding, finding_of
from vlatune.formatting import format_bytes, format_number, format_seconds, plural
from vlatune.gpu_driver import find_problem, read_gpu
from vlatune.policies.base import ModuleOptions
from vlatune.registry import get_policy_info
from vlatune.train.cache_choice import USED, StepCost, plan_stores
from vlatune.train.driver.launch import run_shape
from vlatune.train.driver.ray_cluster import connected, read_nodes, size_for_this_host, worker_resources
from vlatune.train.driver.resume_rules import check_run
from vlatune.train.prefix_choice import GPU_FLOPS, prefix_levels

CPU_SHARE = 0.8
"""Share of free memory for all workers without GPUs; readers and the object store need the rest."""
READER_MARGIN = 1.25
"""Factor on the minimum number of readers, because steps and decoding are uneven."""
READ_ROWS, PLAN_STEPS = 96, 64
"""Rows that are read to measure the cost of a row, and optimizer steps they are taken from."""
FREE_SHARE = 0.9
"""Usable share of free disk space."""


def check_run_folder(case: Case) -> Iterator[Finding]:
    """Check that the run may start or resume in its folder; else continue with a free one."""
    folder = case.config.run_dir
    try:
        check_run(case.config)
    except ValueError as error:
        free = next(one for n in range(2, 1000) if not (one := folder.with_name(f"{folder.name}-{n}")).exists())
        flags = (f"--output_dir={free}",)
        case.apply(flags)
        yield replace(finding_of(error, "run"), flags=flags)
        return
    yield Finding("pass", "run", f"'{folder}' is free, or holds this run")


def check_memory(case: Case) -> Iterator[Finding]:
    """Compare the memory that a worker needs with its device and with other GPU sizes."""
    import torch

    config, columns = case.config, case.batch.inputs
    if case.module is not None:
        footprint = device_memory.measure(case.module, columns, str(next(case.module.parameters()).device))
    else:
        options = ModuleOptions.of(config.policy)
        case.planned = case.adapter.plan_module(case.policy, case.binding, options)
        footprint = device_memory.plan_footprint(case.adapter, case.setup, options, columns, case.planned)
    if footprint is None:
        yield Finding("skipped", "memory", "the weights are too large to load, and the policy has no `plan_module`")
        return
    case.footprint = footprint
    ema, cuda = config.optimizer.ema_decay > 0, torch.cuda.is_available()
    if cuda:
        device_bytes, device = int(torch.cuda.mem_get_info()[1]), "the GPU"
    else:
        device_bytes, device = int(CPU_SHARE * usable_ram_bytes() / config.num_workers), "a worker without a GPU"
    shared: dict[str, Any] = {"ema": ema, "num_workers": config.num_workers, "fsdp": config.fsdp}
    needed = footprint.needed(config.batch_size, cuda=cuda, **shared)
    state = footprint.state_bytes(**shared) + footprint.saved
    figures = {
        "needed_bytes": needed,
        "device_bytes": device_bytes,
        "state_bytes": footprint.state_bytes(**shared),
        "bytes_per_sample": footprint.saved_per_sample,
        "largest_batch": footprint.largest_batch(device_bytes, cuda=cuda, **shared),
        "fits": {size: footprint.largest_batch(size * GB, **shared) for size in GPU_SIZES},
    }
    text = (
        f"{format_bytes(needed)} per worker at batch size {config.batch_size}: {format_bytes(state)} for weights and "
        f"optimizer, {format_bytes(footprint.saved_per_sample)} per sample; {device} has {format_bytes(device_bytes)}"
    )
    sizes = ", ".join(f"{_batch_text(batch)} on {size} GB" for size, batch in figures["fits"].items())
    text = f"{text}; largest batch on a GPU: {sizes}"
    if needed <= device_memory.USABLE * device_bytes:
        yield Finding("pass", "memory", text, figures=figures)
        return
    fits = [size for size, batch in figures["fits"].items() if batch >= config.batch_size]
    if not cuda and fits:  # the run may be intended for another machine
        yield Finding("warn", "memory", text, remedy=f"use a GPU of {fits[0]} GB", figures=figures)
        return
    checkpointed = None
    if "gradient_checkpointing" in get_policy_info(config.policy.type).settings:
        options = replace(ModuleOptions.of(config.policy), gradient_checkpointing=True)
        checkpointed = device_memory.plan_footprint(case.adapter, case.setup, options, columns)
    most_bytes = device_bytes if cuda else GPU_SIZES[-1] * GB
    flags = device_memory.flags_that_fit(config, footprint, checkpointed, most_bytes)
    remedy = f"keep the global batch on {format_bytes(most_bytes)} with" if flags else "train less (--policy.train)"
    if not flags and footprint.gathered and not config.fsdp:
        remedy += ", or shard over several GPUs (--num_workers=2 --fsdp=true)"
    yield Finding("fail" if cuda else "warn", "memory", text, remedy=remedy, flags=flags, figures=figures)


def _batch_text(batch: int) -> str:
    return f"{batch:,} or more" if batch == device_memory.MAX_BATCH else f"{batch:,}" if batch else "none"


def check_reading(case: Case) -> Iterator[Finding]:
    """Compare the CPU time to read a row with the step time, and derive the number of readers."""
    config, row_s = case.config, read_cost(case)
    sizing = plan_sizing(case)
    if case.step_s is not None:
        step_s, source = case.step_s / len(case.batch.rows["index"]), "measured"
    else:
        flops = case.adapter.step_flops(case.policy, case.binding, ModuleOptions.of(config.policy))
        step_s = max(flops, CORE_FLOPS * 1e-6) / GPU_FLOPS
        source = f"estimated for a GPU with {GPU_FLOPS / 1e12:.0f} TFLOP/s"
    on_cpu = not any(node.gpus for node in sizing.nodes)
    needed, readers = int(np.ceil(READER_MARGIN * row_s / step_s)), sizing.budget.readers
    figures = {"row_cpu_s": row_s, "step_s_per_sample": step_s, "readers_needed": needed, "readers": readers}
    if on_cpu:  # reading and steps share the cores
        core_s = row_s + step_s * sizing.torch_threads
        case.sample_s = max(step_s, core_s * config.num_workers / sum(node.cpus for node in sizing.nodes))
    else:
        case.sample_s = max(step_s, row_s / max(1, readers))
    text = f"a sample costs {_short(row_s)} of a core to read and {_short(step_s)} of a step ({source})"
    text = f"{text}: {plural(needed, 'reader')} per worker needed, {readers} available"
    if needed <= readers or on_cpu:
        yield Finding("pass", "reading", text, figures=figures)
        return
    length = 2 * case.setup.order.run_length
    window_rows = max(length, case.setup.order.window_rows)
    flags = (f"--dataset.run_length={length}", f"--dataset.window_rows={window_rows}")
    remedy = "give each GPU more CPUs, or decode longer runs of frames"
    yield Finding("warn", "reading", text, remedy=remedy, flags=flags, figures=figures)


def check_cache(case: Case) -> Iterator[Finding]:
    """Check what the run stores instead of computing it again: show the table of all levels; the text states what the frame cache is worth."""
    step, on_gpu = StepCost(), any(node.gpus for node in plan_sizing(case).nodes)
    if case.step_s is not None:
        step = StepCost(case.step_s / num_rows(case.batch.rows), is_on_readers_cores=not on_gpu)
    decision = f"--policy.keep_prefix={case.config.policy.keep_prefix}"
    others = partial(prefix_levels, case.config, case.setup, on_gpu=on_gpu, decision=decision)
    plan = plan_stores(case.config, case.setup, others, step)
    text, frames = plan.frames.decision, plan.frames
    without_s, with_s = (plan.epoch_s(frames, is_stored=stored) for stored in (False, True))
    if frames.decision == USED and without_s is not None and with_s is not None:
        times = f"an epoch takes {format_seconds(without_s)} without them, {format_seconds(with_s)} with them"
        text = f"decoded frames are kept in '{plan.settings and plan.settings.folder}': {times}"
    yield Finding("pass", "cache", text, figures=plan.to_json() | {"table": plan.lines()})


def check_duration(case: Case) -> Iterator[Finding]:
    """Estimate the duration of the run from the cost of a sample."""
    config = case.config
    assert case.sample_s is not None  # set by `check_reading`
    step_s = case.sample_s * config.batch_size * config.grad_accum
    basis = "measured here" if case.step_s is not None else f"on a GPU with {GPU_FLOPS / 1e12:.0f} TFLOP/s"
    total = f"about {format_seconds(config.steps * step_s)} for {plural(config.steps, 'optimizer step')}"
    text = f"{total} of {_short(step_s)} ({basis}), without start-up, validation and checkpoints"
    yield Finding("pass", "duration", text, figures={"seconds": config.steps * step_s, "step_s": step_s})


def check_cost(case: Case) -> Iterator[Finding]:
    """Estimate time and price of the run on common GPUs."""
    from vlatune.train.worker.transfer import collate

    module = case.planned if case.module is None else run_cost.on_meta(case.module)
    if module is None:
        yield Finding("skipped", "cost", "the weights are too large to load, and the policy has no `plan_module`")
        return
    config, ema = case.config, case.config.optimizer.ema_decay > 0
    begin, tensors = time.perf_counter(), collate(case.batch.inputs).to_tensors().tensors
    kernels = run_cost.count_kernels(module, tensors, config.batch_size)
    trained = sum(one.numel() for one in module.parameters() if one.requires_grad)
    work = run_cost.StepWork(kernels, config.grad_accum, trained, config.num_workers, ema)
    shared = {"ema": ema, "num_workers": config.num_workers}
    needed = case.footprint and case.footprint.needed(config.batch_size, **shared) / device_memory.USABLE
    found = [run_cost.estimate(config, work, one, case.usd_per_hour, needed) for one in run_cost.DEVICES]
    figures = run_cost.cost_figures(found, work)
    counted = f"{plural(len(kernels), 'kernel')}, {figures['flops']:.3g} FLOP, {format_bytes(figures['bytes'])} moved"
    best = min((one for one in found if one.fits is not False), key=lambda one: one.usd, default=None)
    least = (
        f"; cheapest: {best.device}, about {format_seconds(3600 * best.hours)} and {best.usd:.2f} USD" if best else ""
    )
    text = f"{counted} per micro-step, counted in {format_seconds(time.perf_counter() - begin)}{least} (estimate, see below)"
    yield Finding("pass", "cost", text, figures=figures | {"table": run_cost.cost_table(found, config)})


def _short(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 0.01 else f"{format_number(1000 * seconds, digits=2)} ms"


def read_cost(case: Case) -> float:
    """Return the CPU seconds to read and transform a row with images."""
    plan, share = case.setup.data_plan, Share(0, case.config.num_workers)
    last = min(PLAN_STEPS, case.config.steps, plan.order.batches_per_epoch)
    chosen, rows = [], 0
    for piece in sorted(plan_steps(plan.order, share, 0, last), key=lambda piece: -len(piece.frames)):
        chosen.append(piece)
        rows += len(piece.frames)
        if rows >= READ_ROWS:
            break
    begin = time.process_time()
    for unit in make_units(plan, share, chosen):
        apply_all(plan.transforms, read_unit(plan.specs[unit.dataset_index], unit))
    return (time.process_time() - begin) / rows


def plan_sizing(case: Case) -> Sizing:
    """Return cores, readers and object store as the run would get them."""
    run = run_shape(case.run_config(), case.setup)
    if not os.environ.get("RAY_ADDRESS"):
        return size_for_this_host(case.config, run)
    with connected():
        return plan_on_nodes(read_nodes(), run)


def check_storage(case: Case) -> Iterator[Finding]:
    """Check that checkpoints can be written and fit on the disk."""
    config = case.config
    store = open_store(config.run_dir, config.storage_path)
    if not isinstance(store, LocalStore):
        store.check_writable()
        yield Finding("pass", "storage", "a test file was written and removed", place=str(config.storage_path))
        return
    folder = _existing(store.staging)
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"vlatune")
    except OSError as error:
        text = f"'{folder}' is not writable ({error.strerror})"
        yield Finding("fail", "storage", text, remedy="choose another --output_dir")
        return
    free = shutil.disk_usage(folder).free
    if case.footprint is None:
        text = f"'{folder}' is writable and has {format_bytes(free)} free"
        yield Finding("pass", "storage", text, figures={"free_bytes": free})
        return
    each = case.footprint.checkpoint_bytes(ema=config.optimizer.ema_decay > 0)
    kept = config.keep_checkpoints + config.kept_best
    needed = (kept + 1) * each
    figures = {"free_bytes": free, "checkpoint_bytes": each, "needed_bytes": needed}
    text = f"{kept:,} checkpoints of {format_bytes(each)} and one being written take {format_bytes(needed)}"
    text = f"{text}; '{folder}' has {format_bytes(free)} free"
    if needed <= FREE_SHARE * free:
        yield Finding("pass", "storage", text, figures=figures)
        return
    most = int(FREE_SHARE * FREE_SHARE * free // max(1, each)) - 1 - config.kept_best  # with a margin for others
    flags = (f"--keep_checkpoints={most}",) if most >= 1 else ()
    remedy = "keep fewer checkpoints" if flags else "name a disk with more space with --output_dir"
    yield Finding("fail", "storage", text, remedy=remedy, flags=flags, figures=figures)


def _existing(folder: Path) -> Path:
    """Return the folder or its nearest existing parent."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def check_cluster(case: Case) -> Iterator[Finding]:
    """Check workers, readers and object store on this machine or the cluster at RAY_ADDRESS."""
    sizing, workers = plan_sizing(case), case.config.num_workers
    yield from (finding_of(text, "cluster", "warn") for text in sizing.warnings)
    is_local = not os.environ.get("RAY_ADDRESS")
    cpus, gpus = sum(node.cpus for node in sizing.nodes), sum(node.gpus for node in sizing.nodes)
    machine = "this machine" if is_local else "the cluster at RAY_ADDRESS"
    figures = {"cpus": cpus, "gpus": gpus, "readers": sizing.budget.readers, "store_bytes": sizing.store_bytes}
    if 0 < gpus < workers:
        text, flags = f"{machine} has {gpus} GPUs for {workers} workers", (f"--num_workers={gpus}",)
        remedy = "use one worker per GPU"
        yield Finding("fail", "cluster", text, expected="one GPU per worker", remedy=remedy, flags=flags)
        return
    if gpus and is_local and (problem := find_problem(read_gpu())):
        yield finding_of(problem, "cluster")
        return
    wanted = case.config.policy.compile
    if is_local and (wanted == "true" or (wanted == "auto" and gpus)):
        from vlatune.train.worker.device import compiler_problem, may_compile

        problem = compiler_problem("cuda" if gpus else "cpu")
        if problem and (wanted == "true" or may_compile(case.config)):
            found = finding_of(problem, "cluster", "fail" if wanted == "true" else "warn")
            yield replace(found, flags=("--policy.compile=false",))
            if wanted == "true":
                return
    if not is_local:
        from vlatune.train.driver.ray_nodes import check_nodes

        with connected():
            yield from check_nodes(case.config, case.setup, worker_resources(sizing))
    each = f"{plural(sizing.budget.readers, 'reader')} and {plural(sizing.torch_threads, 'torch thread')} per worker"
    text = f"{machine}: {plural(cpus, 'CPU')}, {plural(gpus, 'GPU')}; {plural(workers, 'worker')}, {each}, "
    yield Finding("pass", "cluster", f"{text}object store of {format_bytes(sizing.store_bytes)}", figures=figures)
