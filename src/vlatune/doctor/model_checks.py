"""The policy of a run: its base, its chunk of actions, what of it trains, and the loss of the first batch.

Nothing here knows a policy: what there is to know is asked of its card and its adapter. torch is imported when the weights are
loaded, which happens where there is room for them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import num_rows
from vlatune.config import RunConfig, makes_base
from vlatune.doctor.device_memory import weight_bytes
from vlatune.doctor.findings import MAX_SHOWN, Case, Finding, edit_json_command, editable_base, refused
from vlatune.doctor.machine_checks import sizing_of
from vlatune.files import real_path
from vlatune.pipeline.sizing import CORE_FLOPS, usable_cpus, usable_ram_bytes
from vlatune.policies.base import ModuleOptions
from vlatune.policies.base_folder import read_object, resolve_folder
from vlatune.policies.processors import CONFIG
from vlatune.policies.registry import get_adapter, get_policy
from vlatune.report.formatting import format_bytes, format_number, format_seconds, format_share, plural
from vlatune.report.run_folder import CONFIG_FILE
from vlatune.train.driver.tiny_base import BASE, with_base

RAM_SHARE = 0.5
"""Of the free memory that loading the weights may take."""
MOST_STEP_S = 20.0
"""Longer steps, by their operations, are not run."""
ROUNDING = 2.0**-7
"""Relative, between a stored value and the same in bfloat16."""


def check_base(case: Case) -> Iterator[Finding]:
    """The base model's folder: fetched or made, understood, and every tensor that it needs in its files."""
    config, is_own = case.config, makes_base(case.config)
    try:
        case.base_path = _own_base(case) if is_own else str(config.policy.path)
        case.folder = resolve_folder(case.base_path, config.policy.revision)
        case.adapter = get_adapter(config.policy.type)
        case.policy = case.adapter.read_spec(case.folder)
    except (ValueError, RuntimeError) as error:
        flags, command = _other_base(config)
        yield refused(error, flags=flags, command=command)
        return
    what = "made for the datasets, with random weights" if is_own else case.base_path
    size = weight_bytes(str(case.folder))
    yield Finding(
        "pass", f"{what}: {format_bytes(size)} of weights", figures={"bytes": size, "folder": str(case.folder)}
    )


def _own_base(case: Case) -> str:
    """The run's own, where it has begun; else one made aside, as the run would make it."""
    run_dir, config = case.config.run_dir, case.config
    if not ((run_dir / CONFIG_FILE).exists() and (run_dir / BASE).is_dir()):
        config = replace(config, output_dir=str(case.scratch / "run"), resume=False)
    return str(with_base(config, case.metas, say=lambda text: None).policy.path)


def _other_base(config: RunConfig) -> tuple[tuple[str, ...], str]:
    """Flags and command that give a whole base in place of one that cannot be used."""
    card, path = get_policy(config.policy.type), config.policy.path or ""
    if makes_base(replace(config, policy=replace(config.policy, path=None))) and path:
        return ("--policy.path=null",), ""
    if not Path(path).expanduser().is_dir() and path.count("/") == 1:
        revision = f" --revision {config.policy.revision}" if config.policy.revision else ""
        return (), f"hf download {path}{revision} --force-download"
    return ((f"--policy.path={card.hub_base}",) if card.hub_base and path != card.hub_base else ()), ""


def check_horizon(case: Case) -> Iterator[Finding]:
    """How far ahead a chunk of actions reaches, in frames and seconds, and how much of it lies past the episodes' ends."""
    stored, horizon, fps = read_object(case.folder, CONFIG), case.policy.horizon, case.metas[0].fps
    fields = case.adapter.horizon_fields
    if not any(stored.get(name) for name in fields):
        taken, (folder, flags, fetch) = stored.get("n_action_steps") or horizon, editable_base(case)
        yield Finding(
            "fail",
            f"{case.folder / CONFIG} does not say how many actions a chunk has; {horizon} would be taken, {horizon / fps:.3g} s",
            f"set {fields[0]} to what the base was trained with",
            flags,
            f"{fetch}{edit_json_command(folder / CONFIG, [[fields[0], int(taken)]])}",
        )
        return
    lengths = np.concatenate([meta.episodes.length for meta in case.metas])
    ahead = max(0, *case.policy.action_offsets)
    padded = float(
        np.minimum(ahead, lengths).sum() / (2 * lengths.sum())
    )  # of an episode's last frames, half on average
    figures = {"horizon": horizon, "seconds": horizon / fps, "padded_share": padded}
    if ahead >= int(np.median(lengths)):
        yield Finding(
            "warn",
            f"a chunk of {horizon} actions is longer than most episodes ({int(np.median(lengths))} frames, median)",
            "check fps and the cuts of the episodes, or take a base with a shorter chunk",
            figures=figures,
        )
        return
    said = f"{plural(horizon, 'action')} in a chunk, {horizon / fps:.3g} s at {fps:g} fps; about {format_share(padded)} lie past an episode's end"
    yield Finding("pass", said, figures=figures)


def check_weights(case: Case) -> Iterator[Finding]:
    """Loads the module as a worker does, and compares what it holds with the files, tensor by tensor."""
    size, free = weight_bytes(str(case.folder)), usable_ram_bytes()
    device, room = _device()
    if size > (room if room is not None else RAM_SHARE * free):
        where = f"{format_bytes(room)} of {device}" if room is not None else f"half of {format_bytes(free)} of memory"
        yield Finding(
            "skipped",
            f"{format_bytes(size)} of weights are not loaded here, as they take more than {where}; that every tensor is in the files, in its shape, was checked",
        )
        return
    import torch

    torch.set_num_threads(sizing_of(case).torch_threads)  # as the run's: more would wait for each other
    options = replace(ModuleOptions.of(case.config.policy), compile=False)
    case.module = case.adapter.load_module(case.policy, case.binding, options, device, stats=case.setup.stats)
    found = compare_weights(case)
    figures = {"stored": found["stored"], "loaded": found["equal"]}
    if found["different"]:
        yield Finding(
            "fail",
            f"{len(found['different'])} tensors of the base did not reach the model: {', '.join(found['different'][:MAX_SHOWN])}",
            "the adapter of this policy loads other values than its files hold",
            figures=figures,
        )
        return
    unused = found["stored"] - found["equal"]
    rest = f"; {unused} that no step uses" if unused else ""
    yield Finding(
        "pass",
        f"{found['equal']:,} of {plural(found['stored'], 'tensor')} of the base in the model, value for value{rest}",
        figures=figures,
    )


def _device() -> tuple[str, int | None]:
    """Where a worker of this machine computes, and how much is free there; None for the host's own memory."""
    import torch

    if torch.cuda.is_available():
        return "cuda", int(torch.cuda.mem_get_info()[0])
    return "cpu", None


def compare_weights(case: Case) -> dict[str, Any]:
    """How many tensors the files hold, how many of them the module holds, and which it holds with other values."""
    from safetensors import safe_open

    held = case.module.state_dict()
    by_end = {_end(name): name for name in held}
    keys = [(file, key) for file in sorted(case.folder.glob("model*.safetensors")) for key in _keys(case, file)]
    own = {names[0] for _, key in keys if (names := case.adapter.stored_names(key))}
    stored, equal, different = len(keys), 0, []
    for file, in_file in groupby(keys, key=lambda pair: pair[0]):
        with safe_open(real_path(case.folder, file.name), framework="pt") as tensors:
            for _, key in in_file:
                wanted = case.adapter.stored_names(key)
                wanted = [
                    *wanted[:1],
                    *(one for one in wanted[1:] if one not in own),
                ]  # one of its own goes before a tied one
                names = [by_end[end] for one in wanted if (end := _find(by_end, one)) is not None]
                part = tensors.get_slice(key)
                first = part[:1] if part.get_shape() else tensors.get_tensor(key)
                wrong = [name for name in names if not _is_same(held[name], first)]
                equal += bool(names) and not wrong
                different += wrong
    return {"stored": stored, "equal": equal, "different": different}


def _keys(case: Case, file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(real_path(case.folder, file.name), framework="pt") as tensors:
        return list(tensors.keys())


def _end(name: str) -> str:
    """Adapters and compiled modules put a layer of their own around a weight."""
    return name.replace(".base_layer.", ".").replace("_orig_mod.", "")


def _find(by_end: dict[str, str], name: str) -> str | None:
    """A module may hold LeRobot's under a name of its own: `policy.model.x` for `model.x`."""
    if name in by_end:
        return name
    return next((one for one in by_end if one.endswith(f".{name}")), None)


def _is_same(held: Any, first: Any) -> bool:
    import torch

    mine = (held[: len(first)] if first.dim() else held).detach().to("cpu", torch.float32)
    other = first.to(torch.float32)
    return mine.shape == other.shape and bool(torch.allclose(mine, other, rtol=ROUNDING, atol=1e-30, equal_nan=True))


def check_trainable(case: Case) -> Iterator[Finding]:
    """How many parameters train, and that they are float32."""
    import torch

    trained = {name: one for name, one in case.module.named_parameters() if one.requires_grad}
    total, number = sum(one.numel() for one in case.module.parameters()), sum(one.numel() for one in trained.values())
    figures = {"trainable": number, "parameters": total, "tensors": len(trained)}
    if not trained:
        yield Finding(
            "fail", f"--policy.train={case.config.policy.train}: nothing trains", "choose another way", figures=figures
        )
        return
    other = [name for name, one in trained.items() if one.dtype != torch.float32]
    if other:
        yield Finding(
            "warn",
            f"{len(other)} trained tensors are not float32: {', '.join(other[:MAX_SHOWN])}",
            "small updates are rounded away",
            figures=figures,
        )
    yield Finding(
        "pass",
        f"{number:,} of {total:,} parameters train ({format_share(number / total)}), in {plural(len(trained), 'tensor')}",
        figures=figures,
    )


def check_loss(case: Case) -> Iterator[Finding]:
    """A forward and a backward pass of the first batch: the loss is finite, and all that trains gets a gradient."""
    import torch

    from vlatune.train.worker.transfer import collate

    rows = num_rows(case.batch.rows)
    flops = case.adapter.step_flops(case.policy, case.binding, ModuleOptions.of(case.config.policy)) * rows
    device = next(case.module.parameters()).device
    expected_s = flops / (CORE_FLOPS * usable_cpus())
    if device.type == "cpu" and expected_s > MOST_STEP_S:
        yield Finding(
            "skipped", f"a step of {rows} rows would take about {format_seconds(expected_s)} on this machine's CPU"
        )
        return
    batch = {key: values.to(device) for key, values in collate(case.batch.seen).wrapped().tensors.items()}
    case.module.train()
    with _watched_pictures(case):
        loss = case.module(batch)
    loss.backward()
    without = [name for name, one in case.module.named_parameters() if one.requires_grad and one.grad is None]
    value = float(loss.detach())
    begin = time.perf_counter()
    case.module(batch).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    case.step_s = time.perf_counter() - begin
    case.module.zero_grad(set_to_none=True)
    figures = {"loss": value, "step_s": case.step_s}
    if not np.isfinite(value):
        yield Finding(
            "fail",
            f"the loss of the first batch is {value}",
            "look at the values and pictures of the batch on the page",
            figures=figures,
        )
    elif without:
        said = f"{plural(len(without), 'trained tensor')} without a gradient: {', '.join(without[:MAX_SHOWN])}"
        yield Finding(
            "fail",
            f"{said}; several workers would wait for it forever",
            "freeze what no forward uses, in the policy's adapter",
            figures=figures,
        )
    else:
        yield Finding(
            "pass",
            f"{format_number(value)} on the first batch, every trained tensor has a gradient; {format_seconds(case.step_s)} a micro-step on {device.type}",
            figures=figures,
        )


@contextmanager
def _watched_pictures(case: Case) -> Iterator[None]:
    """While active, notes the least and the largest value that reaches the module's first convolution."""
    import torch

    first = next((one for one in case.module.modules() if isinstance(one, torch.nn.Conv2d)), None)
    if first is None:
        yield
        return

    def note(_: Any, inputs: tuple[Any, ...]) -> None:
        low, high = (float(one) for one in torch.aminmax(inputs[0].detach().float()))
        before = case.seen_range or (low, high)
        case.seen_range = (min(low, before[0]), max(high, before[1]))

    hook = first.register_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()
