"""The machine or cluster that a run is to use: memory, order and speed of reading, storage, credentials, resources."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from vlatune.checkpoint.local_store import LocalStore
from vlatune.checkpoint.store import open_store
from vlatune.config import RunConfig
from vlatune.dataset.order.sample_order import OrderSpec, check_order
from vlatune.dataset.order.shuffle_meter import Shuffle, measure_shuffle
from vlatune.dataset.reader import read_unit
from vlatune.dataset.storage.feature_files import free_bytes
from vlatune.doctor import device_memory
from vlatune.doctor.findings import Case, Finding, refused
from vlatune.pipeline.plan import Share, make_units, plan_steps
from vlatune.pipeline.sizing import CORE_FLOPS, Sizing, plan_on_nodes, usable_ram_bytes
from vlatune.policies.base import ModuleOptions
from vlatune.report.formatting import format_bytes, format_number, format_seconds, format_share, plural
from vlatune.report.section_data import DISTINCT_FINE, NEIGHBOURS_FINE
from vlatune.run_setup import Setup
from vlatune.train.driver.cluster import ask_nodes, size_for_this_host
from vlatune.train.driver.feature_stage import Stage, find_missing, plan_parts
from vlatune.train.driver.launch import run_shape
from vlatune.train.driver.resume_rules import check_run

CPU_SHARE = 0.8
"""Of the free memory of a machine without GPUs, for all workers: readers and the object store need some, too."""
HEAD_ROOM = 1.25
"""Readers beyond those that would just do: neither steps nor decoding are even."""
GPU_FLOPS = 100e12
"""What a step on a data-centre GPU reaches in bfloat16, roughly; where none is here, the step's need is estimated with it."""
READ_ROWS, PLAN_STEPS = 96, 64
"""Rows that are read to learn what a row costs, and optimizer steps whose plan they are taken from."""
FREE_SHARE = 0.9
ROOM_LEFT = 0.9
"""Of that, for a remedy: others write to the disk, too, before it is tried."""
MIXES = ((32, 64), (16, 64), (16, 128), (8, 128), (8, 256), (4, 256), (2, 512), (1, 512))
"""(run_length, window_rows) that are tried, from the cheapest to decode to the best mixed."""


def check_memory(case: Case) -> Iterator[Finding]:
    """What a worker needs of its device, against what is there, and what would fit other devices."""
    config, columns = case.config, case.batch.seen
    own = _own_footprint(case)
    if own is None:
        yield Finding("skipped", "the weights are too large to load here, and the policy has no plan of its module")
        return
    case.footprint = own
    ways = device_memory.fitting_ways(config, case.setup, columns)
    ema, ahead = config.optimizer.ema_decay > 0, config.prefetch_batches
    what, room, cuda = _room(config)
    needed = own.needed(config.batch_size, ema=ema, ahead=ahead, cuda=cuda)
    figures = {
        "needed_bytes": needed,
        "device_bytes": room,
        "state_bytes": own.state_bytes(ema=ema),
        "bytes_per_sample": own.kept_per_sample,
        "largest_batch": own.largest_batch(room, ema=ema, ahead=ahead, cuda=cuda),
        "fits": {
            f"{one.train}{'+checkpointing' if one.gradient_checkpointing else ''}": dict(one.batches) for one in ways
        },
        "table": device_memory.table_rows(ways),
    }
    said = (
        f"{format_bytes(needed)} a worker at a batch of {config.batch_size}: {format_bytes(own.state_bytes(ema=ema) + own.kept)} for weights and optimizer, "
        f"{format_bytes(own.kept_per_sample)} a sample; {what} {format_bytes(room)}"
    )
    if needed <= device_memory.USABLE * room:
        yield Finding("pass", said, figures=figures)
    elif cuda:
        flags = device_memory.smaller(config, ways, own, room)
        remedy = "with the same global batch" if flags else "no way to train this policy fits the GPU"
        yield Finding("fail", said, remedy, flags, figures=figures)
    else:  # it may be meant for another machine
        held = [
            size
            for size in device_memory.GPU_SIZES
            if own.needed(config.batch_size, ema=ema, ahead=ahead) <= device_memory.USABLE * size * device_memory.GB
        ]
        fits = (
            f"a GPU of {held[0]} GB holds it"
            if held
            else f"it needs a GPU of more than {device_memory.GPU_SIZES[-1]} GB, or what fits one"
        )
        flags = () if held else device_memory.smaller(config, ways, own, device_memory.GPU_SIZES[-1] * device_memory.GB)
        yield Finding("warn", said, fits, flags, figures=figures)


def _own_footprint(case: Case) -> device_memory.Footprint | None:
    if case.module is not None:
        device = next(case.module.parameters()).device
        return device_memory.measure(case.module, case.batch.seen, str(device))
    options = replace(ModuleOptions.of(case.config.policy), compile=False)
    return device_memory.plan_footprint(case.adapter, case.setup, options, case.batch.seen)


def _room(config: RunConfig) -> tuple[str, int, bool]:
    """What a worker has for itself: in words, in bytes, and whether that is a GPU's."""
    import torch

    if torch.cuda.is_available():
        return "the GPU has", int(torch.cuda.mem_get_info()[1]), True
    share = int(CPU_SHARE * usable_ram_bytes() / config.num_workers)
    return "without a GPU a worker may take, of this machine's memory,", share, False


def check_shuffle(case: Case) -> Iterator[Finding]:
    """How well the first epoch is mixed, against a true permutation; a mix that would do, where this one does not."""
    order = case.setup.order
    found = measure_shuffle(order)
    figures = found.to_json()
    said = (
        f"{format_number(found.distinct_episodes.order, digits=3)} episodes in a batch of {found.global_batch} "
        f"({format_number(found.distinct_episodes.permutation, digits=3)} if frames were shuffled singly), next frame in the same batch: "
        f"{format_share(found.neighbour_rate.order)} ({format_share(found.neighbour_rate.permutation)})"
    )
    if is_mixed(found):
        yield Finding("pass", said, figures=figures)
        return
    for run_length, window_rows in MIXES:
        other = replace(order, run_length=run_length, window_rows=window_rows)
        if run_length <= order.run_length and window_rows >= order.window_rows and _is_mixed_order(other):
            flags = (f"--dataset.run_length={run_length}", f"--dataset.window_rows={window_rows}")
            yield Finding(
                "warn", said, "mixes as well as single frames, and decodes more slowly", flags, figures=figures
            )
            return
    yield Finding("warn", said, "more and shorter episodes would mix better", figures=figures)


def is_mixed(found: Shuffle) -> bool:
    distinct, close = found.distinct_episodes, found.neighbour_rate
    few = distinct.order < DISTINCT_FINE * distinct.permutation
    return not few and close.order <= NEIGHBOURS_FINE * close.permutation


def _is_mixed_order(order: OrderSpec) -> bool:
    try:
        check_order(order)
    except ValueError:
        return False
    return is_mixed(measure_shuffle(order))


def check_reading(case: Case) -> Iterator[Finding]:
    """CPU time that a row costs to read and prepare, against what the step takes, and the readers that this makes."""
    row_s, rows = read_cost(case)
    if case.setup.kept:
        yield Finding(
            "pass",
            f"a row's pictures cost {_short(row_s)} of a core to read, once, before training, which reads the "
            f"{format_bytes(len(case.binding.cameras) * case.setup.kept.nbytes)} of features that are kept of them",
            figures={"row_cpu_s": row_s, "rows": rows},
        )
        return
    sizing = sizing_of(case)
    step_s, source = _sample_step_s(case)
    on_cpu = not any(node.gpus for node in sizing.nodes)
    needed = int(np.ceil(HEAD_ROOM * row_s / step_s))
    readers = sizing.budget.readers
    figures = {
        "row_cpu_s": row_s,
        "step_s_per_sample": step_s,
        "readers_needed": needed,
        "readers": readers,
        "rows": rows,
    }
    said = f"a sample costs {_short(row_s)} of a core to read and prepare, and {_short(step_s)} of a step ({source})"
    if on_cpu and case.step_s is not None:
        share = row_s / (row_s + step_s * sizing.torch_threads)
        yield Finding(
            "pass",
            f"{said}: training and reading share {sizing.nodes[0].cpus} cores, {format_share(share)} of the time for reading",
            figures=figures,
        )
        return
    said = f"{said}: {plural(needed, 'reader')} a worker, {readers} are there"
    if needed > readers and not on_cpu:
        yield Finding(
            "warn", said, "give each GPU more CPUs, or decode in longer runs", _longer_runs(case), figures=figures
        )
        return
    yield Finding("pass", said, figures=figures)


def _short(seconds: float) -> str:
    return format_seconds(seconds) if seconds >= 0.01 else f"{format_number(1000 * seconds, digits=2)} ms"


def _longer_runs(case: Case) -> tuple[str, ...]:
    length = case.setup.order.run_length
    return (
        f"--dataset.run_length={2 * length}",
        f"--dataset.window_rows={max(2 * length, case.setup.order.window_rows)}",
    )


def read_cost(case: Case) -> tuple[float, int]:
    """Seconds of a core for a row with its pictures, and how many were read: the longest pieces of the run's own plan,
    transforms included.
    """
    plan, share = case.setup.from_pictures().data_plan, Share(0, case.config.num_workers)
    last = min(PLAN_STEPS, case.config.steps, plan.order.batches_per_epoch)
    pieces = sorted(plan_steps(plan.order, share, 0, last), key=lambda piece: -len(piece.frames))
    chosen, rows = [], 0
    for piece in pieces:
        chosen.append(piece)
        rows += len(piece.frames)
        if rows >= READ_ROWS:
            break
    begin = time.process_time()
    for unit in make_units(plan, share, chosen):
        columns = read_unit(plan.specs[unit.dataset_index], unit)
        for transform in plan.transforms:
            columns = transform(columns)
    return (time.process_time() - begin) / rows, rows


def _sample_step_s(case: Case) -> tuple[float, str]:
    rows = len(case.batch.rows["index"])
    if case.step_s is not None:
        return case.step_s / rows, "measured"
    flops = case.adapter.step_flops(case.policy, case.binding, ModuleOptions.of(case.config.policy))
    return max(flops, CORE_FLOPS * 1e-6) / GPU_FLOPS, f"estimated for a GPU at {GPU_FLOPS / 1e12:.0f} TFLOP/s"


def sizing_of(case: Case) -> Sizing:
    """Cores, readers and store as the run would get them."""
    run = run_shape(case.run_config(), case.setup)
    return plan_on_nodes(ask_nodes(), run) if os.environ.get("RAY_ADDRESS") else size_for_this_host(case.config, run)


def check_storage(case: Case) -> Iterator[Finding]:
    """The run's folder is free, and checkpoints can be written, as many as are kept and one more; and kept features."""
    try:
        check_run(case.config)
    except ValueError as error:
        yield refused(error, flags=(f"--output_dir={_free_folder(case.config.run_dir)}",))
        return
    store = open_store(case.config.run_dir, case.config.storage_path)
    if not isinstance(store, LocalStore):
        store.check_writable()
        yield Finding("pass", f"{case.config.storage_path}: a probe was written and removed")
        yield from _check_features(case)
        return
    there = _existing(store.folder)
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"vlatune")
    except OSError as error:
        flags = _elsewhere(case.config, 0)
        yield Finding(
            "fail", f"'{there}' cannot be written to ({error.strerror})", "choose another --output_dir", flags
        )
        return
    yield from _check_room(case, there)
    yield from _check_features(case)


def _check_features(case: Case) -> Iterator[Finding]:
    """What is kept of the pictures, where the run is to keep it and its set-up is known."""
    setup: Setup | None = vars(case).get("setup")
    if setup is None or setup.kept is None or setup.features is None:
        return
    stage, parts = Stage(setup, ModuleOptions.of(case.config.policy)), plan_parts(setup)
    whole, needed = (sum(map(stage.num_bytes, of)) for of in (parts, find_missing(stage, parts)))
    free, pictures = free_bytes(setup.features), sum(len(part.unit.frames) for part in parts)
    figures = {"feature_bytes": whole, "missing_bytes": needed, "free_bytes": free, "pictures": pictures}
    there = "" if needed == whole else f", of which {format_bytes(whole - needed)} are there"
    said = f"features of {pictures:,} pictures are {format_bytes(whole)}{there}; '{setup.features.url}'"
    if free is None:
        yield Finding("pass", f"{said} is an object store", figures=figures)
        return
    said = f"{said} has {format_bytes(free)} free"
    if needed <= FREE_SHARE * free:
        yield Finding("pass", said, figures=figures)
        return
    flags = ("--policy.keep_features=false",)
    yield Finding(
        "fail", said, "take a place with room, or look at the pictures anew each epoch", flags, figures=figures
    )


def _check_room(case: Case, there: Path) -> Iterator[Finding]:
    config, free = case.config, shutil.disk_usage(there).free
    if case.footprint is None:
        yield Finding("pass", f"'{there}' can be written to; {format_bytes(free)} free", figures={"free_bytes": free})
        return
    each = case.footprint.checkpoint_bytes(ema=config.optimizer.ema_decay > 0)
    kept = config.keep_checkpoints + config.keep_best
    needed = (kept + 1) * each
    figures = {"free_bytes": free, "checkpoint_bytes": each, "needed_bytes": needed}
    said = f"{kept:,} checkpoints of {format_bytes(each)} and one in the making are {format_bytes(needed)}; '{there}' has {format_bytes(free)} free"
    if needed <= FREE_SHARE * free:
        yield Finding("pass", said, figures=figures)
        return
    most = int(ROOM_LEFT * FREE_SHARE * free // max(1, each)) - 1 - config.keep_best
    if most >= 1:
        flags: tuple[str, ...] = (f"--keep_checkpoints={most}",)
    elif int(FREE_SHARE * free // max(1, each)) >= 2 and config.keep_best:
        flags = ("--keep_checkpoints=1", "--keep_best=0")
    else:
        flags = _elsewhere(config, needed)
    yield Finding("fail", said, "keep fewer" if most >= 1 else "take a place with room", flags, figures=figures)


def _free_folder(folder: Path) -> Path:
    return next(one for number in range(2, 1000) if not (one := folder.with_name(f"{folder.name}-{number}")).exists())


def _existing(folder: Path) -> Path:
    """The folder, or the first above it that is there: nothing is made."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def _elsewhere(config: RunConfig, needed: int) -> tuple[str, ...]:
    """A run folder where there is room, in the current folder, the home or the temporary one."""
    for place in (Path.cwd() / "runs", Path.home() / "runs", Path(tempfile.gettempdir()) / "runs"):
        there = _existing(place)
        if os.access(there, os.W_OK) and FREE_SHARE * shutil.disk_usage(there).free > needed:
            return (f"--output_dir={place / config.run_dir.name}",)
    return ()


def check_credentials(case: Case) -> Iterator[Finding]:
    """What the run asks others for; that they answered is known from the checks before."""
    config = case.config
    asked = [meta.root.url for meta in case.metas if not meta.root.is_local]
    if config.dataset.repo_id and not config.dataset.root:
        asked.append(f"hub dataset {config.dataset.repo_id}")
    path = config.policy.path
    if path and not Path(path).expanduser().is_dir():
        asked.append(f"hub model {path}")
    if config.storage_path and "://" in config.storage_path:
        asked.append(config.storage_path)
    if not asked:
        yield Finding("pass", "none needed: datasets, base model and checkpoints are on this machine")
        return
    yield Finding("pass", f"accepted by {', '.join(asked)}", figures={"asked": asked})


def check_cluster(case: Case) -> Iterator[Finding]:
    """Workers, readers and object store on this machine, or on the cluster that RAY_ADDRESS names."""
    sizing = sizing_of(case)
    for text in sizing.warnings:
        found, _, remedy = text.partition("; ")
        yield Finding("warn", found, remedy)
    cpus, gpus = sum(node.cpus for node in sizing.nodes), sum(node.gpus for node in sizing.nodes)
    where = "the cluster at RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else "this machine"
    workers = case.config.num_workers
    if 0 < gpus < workers:
        yield Finding(
            "fail", f"{where} has {gpus} GPUs for {workers} workers", "a worker takes one", (f"--num_workers={gpus}",)
        )
        return
    yield Finding(
        "pass",
        f"{where}: {plural(cpus, 'CPU')}, {plural(gpus, 'GPU')}; {plural(workers, 'worker')} with {plural(sizing.budget.readers, 'reader')} and "
        f"{plural(sizing.torch_threads, 'torch thread')} each, an object store of {format_bytes(sizing.store_bytes)}",
        figures={"cpus": cpus, "gpus": gpus, "readers": sizing.budget.readers, "store_bytes": sizing.store_bytes},
    )
