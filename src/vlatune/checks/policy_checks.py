"""Checks of the policy: base model, action chunk, weights, and the first loss.

Everything policy-specific comes from its registry entry and adapter. torch is imported only when
weights are loaded, if they fit into memory.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from vlatune.batch import num_rows
from vlatune.checks.case import MAX_SHOWN, Case
from vlatune.checks.device_memory import weight_bytes
from vlatune.checks.machine_checks import plan_sizing
from vlatune.config.settings import RunConfig, makes_base
from vlatune.feed.sizing import CORE_FLOPS, usable_cpus, usable_ram_bytes
from vlatune.findings import Finding, finding_of
from vlatune.formatting import format_bytes, format_number, format_seconds, format_share, plural
from vlatune.policies.base import ModuleOptions, read_policy
from vlatune.policies.base_folder import read_object, resolve_folder
from vlatune.policies.processors import CONFIG
from vlatune.registry import get_adapter, get_policy_info
from vlatune.run.run_folder import CONFIG_FILE
from vlatune.train.driver.tiny_base import BASE, with_base

RAM_SHARE = 0.5
"""Maximum share of free memory for loading weights."""
MAX_STEP_S = 20.0
"""Steps with a longer estimate are not run."""


def check_base(case: Case) -> Iterator[Finding]:
    """Check that the base model can be read and that its files have all tensors."""
    config, is_made = case.config, makes_base(case.config)
    try:
        case.base_path = _make_base(case) if is_made else str(config.policy.path)
        case.folder = resolve_folder(case.base_path, config.policy.revision)
        case.adapter = get_adapter(config.policy.type)
        case.policy = read_policy(
            case.adapter, case.folder, get_policy_info(config.policy.type), config.policy.overrides
        )
    except (ValueError, RuntimeError) as error:
        flags, command = _other_base(config)
        yield replace(finding_of(error, "base"), flags=flags, command=command)
        return
    size = weight_bytes(str(case.folder))
    source = "random weights, created for the datasets" if is_made else case.base_path
    yield Finding("pass", "base", f"{source}: {format_bytes(size)} of weights", figures={"bytes": size})


def _make_base(case: Case) -> str:
    """Return the base that the run has created, or create one in the scratch folder."""
    run_dir, config = case.config.run_dir, case.config
    if not ((run_dir / CONFIG_FILE).exists() and (run_dir / BASE).is_dir()):
        config = replace(config, output_dir=str(case.scratch / "run"), resume=False)
    return str(with_base(config, case.metas, say=lambda text: None).policy.path)


def _other_base(config: RunConfig) -> tuple[tuple[str, ...], str]:
    """Return flags and command that replace an unusable base model."""
    info, path = get_policy_info(config.policy.type), config.policy.path or ""
    if makes_base(replace(config, policy=replace(config.policy, path=None))) and path:
        return ("--policy.path=null",), ""
    if not Path(path).expanduser().is_dir() and path.count("/") == 1:
        revision = f" --revision {config.policy.revision}" if config.policy.revision else ""
        return (), f"hf download {path}{revision} --force-download"
    return ((f"--policy.path={info.hub_base}",) if info.hub_base and path != info.hub_base else ()), ""


def check_horizon(case: Case) -> Iterator[Finding]:
    """Check the length of an action chunk in frames and seconds, and its share of padding."""
    stored, horizon, fps = read_object(case.folder, CONFIG), case.policy.horizon, case.metas[0].fps
    fields, info = case.adapter.horizon_fields, get_policy_info(case.config.policy.type)
    if not any({**stored, **case.config.policy.overrides}.get(name) for name in fields):
        steps = int(stored.get("n_action_steps") or horizon)
        yield Finding(
            "fail",
            "horizon",
            f"no length of an action chunk; the default is {horizon} actions, {horizon / fps:.3g} s",
            place=str(case.folder / CONFIG),
            expected=fields[0],
            remedy=f"set {fields[0]} to the value that the base was trained with",
            flags=(f"--policy.{fields[0]}={steps}",) if fields[0] in info.option_defaults else (),
        )
        return
    lengths = np.concatenate([meta.episodes.length for meta in case.metas])
    ahead, median = max(0, *case.policy.action_offsets), int(np.median(lengths))
    padded = float(np.minimum(ahead, lengths).sum() / (2 * lengths.sum()))  # chunks at the end are half padding
    figures = {"horizon": horizon, "seconds": horizon / fps, "padded_share": padded}
    if ahead >= median:
        text = f"a chunk of {horizon} actions is longer than most episodes ({median} frames, median)"
        remedy = "check fps and the cuts of the episodes, or use a base with a shorter chunk"
        yield Finding("warn", "horizon", text, remedy=remedy, figures=figures)
        return
    text = (
        f"{plural(horizon, 'action')} in a chunk, {horizon / fps:.3g} s at {fps:g} fps; {format_share(padded)} padding"
    )
    yield Finding("pass", "horizon", text, figures=figures)


def check_weights(case: Case) -> Iterator[Finding]:
    """Load the module like a worker, and count its trainable parameters."""
    import torch

    size, device = weight_bytes(str(case.folder)), "cuda" if torch.cuda.is_available() else "cpu"
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else RAM_SHARE * usable_ram_bytes()
    if size > free:
        text = (
            f"{format_bytes(size)} of weights are not loaded: more than {format_bytes(free)} of free memory ({device})"
        )
        yield Finding("skipped", "weights", f"{text}; the files have every tensor in its shape")
        return
    torch.set_num_threads(plan_sizing(case).torch_threads)  # as in the run; more threads would contend
    options = ModuleOptions.of(case.config.policy)
    try:
        case.module = case.adapter.load_module(case.policy, case.binding, options, device, stats=case.setup.stats)
    except ValueError as error:
        flags, command = _other_base(case.config)
        yield replace(finding_of(error, "weights"), flags=flags, command=command)
        return
    every = list(case.module.parameters())
    total, trained = sum(one.numel() for one in every), sum(one.numel() for one in every if one.requires_grad)
    figures = {"bytes": size, "trainable": trained, "parameters": total}
    share = f"{trained:,} of {total:,} parameters ({format_share(trained / total)}) are trained"
    yield Finding("pass", "weights", f"{format_bytes(size)} loaded ({device}); {share}", figures=figures)


def check_loss(case: Case) -> Iterator[Finding]:
    """Run forward and backward on the first batch; check for a finite loss and all gradients."""
    import torch

    from vlatune.train.worker.transfer import collate

    rows = num_rows(case.batch.rows)
    flops = case.adapter.step_flops(case.policy, case.binding, ModuleOptions.of(case.config.policy)) * rows
    device = next(case.module.parameters()).device
    expected_s = flops / (CORE_FLOPS * usable_cpus())
    if device.type == "cpu" and expected_s > MAX_STEP_S:
        yield Finding("skipped", "loss", f"a step would take about {format_seconds(expected_s)} on this CPU")
        return
    batch = {key: values.to(device) for key, values in collate(case.batch.inputs).to_tensors().tensors.items()}
    case.module.train()
    loss = case.module(batch).loss
    loss.backward()
    without = [name for name, one in case.module.named_parameters() if one.requires_grad and one.grad is None]
    value = float(loss.detach())
    begin = time.perf_counter()
    case.module(batch).loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    case.step_s = time.perf_counter() - begin
    case.module.zero_grad(set_to_none=True)
    figures = {"loss": value, "step_s": case.step_s}
    if not np.isfinite(value):
        remedy = "check the values and images of the batch on the page"
        yield Finding("fail", "loss", f"the loss of the first batch is {value}", remedy=remedy, figures=figures)
    elif without:
        text = f"{plural(len(without), 'trainable tensor')} without a gradient: {', '.join(without[:MAX_SHOWN])}"
        remedy = "freeze them in the policy's adapter; several workers would wait for them forever"
        yield Finding("fail", "loss", text, remedy=remedy, figures=figures)
    else:
        step = f"{format_seconds(case.step_s)} per micro-step on {device.type}"
        text = f"{format_number(value)} on the first batch, with all gradients; {step}"
        yield Finding("pass", "loss", text, figures=figures)
