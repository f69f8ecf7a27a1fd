"""The policy of a run: its base, what of it trains, and the first batch on its way through it.

Nothing here knows a policy: what there is to know is asked of its card and its adapter. torch is imported when the weights are
loaded, which happens where there is room for them.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.batch import SLOT, TASK, TOKEN_MASK, Columns, num_rows
from vlatune.config import RunConfig, makes_base
from vlatune.dataset.reader import allocate, read_into
from vlatune.dataset.video.resize import letterbox_box
from vlatune.doctor.device_memory import weight_bytes
from vlatune.doctor.findings import Case, Finding, FirstBatch, Prompt, divide_stats_command, edit_json_command, refused
from vlatune.doctor.machine_checks import sizing_of
from vlatune.files import real_path
from vlatune.pipeline.plan import Share, make_units, plan_steps
from vlatune.pipeline.sizing import CORE_FLOPS, usable_cpus, usable_ram_bytes
from vlatune.pipeline.transforms import Transform, apply_all
from vlatune.policies.base import ModuleOptions
from vlatune.policies.base_folder import read_object, resolve_folder
from vlatune.policies.processors import CONFIG, PREPROCESSOR
from vlatune.policies.registry import get_adapter, get_policy
from vlatune.policies.tokenizer import Tokenise, load_tokenizer
from vlatune.report.formatting import format_bytes, format_number, format_seconds, format_share, plural
from vlatune.report.run_folder import CONFIG_FILE
from vlatune.run_setup import Setup
from vlatune.train.driver.tiny_base import BASE, with_base

MAX_ROWS = 32
"""Of the first batch that are read; the page shows fewer."""
MAX_TASKS = 2000
NO_LIMIT = 10**6
"""Tokens that a prompt is counted up to."""
TOKEN_MULTIPLE = 8
RAM_SHARE = 0.5
"""Of the free memory that loading the weights may take."""
MOST_STEP_S = 20.0
"""Longer steps, by their operations, are not run."""
ROUNDING = 2.0**-7
"""Relative, between a stored value and the same in bfloat16."""
ONE_COLOUR, WHITE, NEARLY_ALL = 8, 250, 0.6
MAX_SCALE, MIN_SPREAD = 20.0, 0.05
"""Pictures of a policy are within a few units of zero, and apart from each other; 0..255 and its statistics are not."""
MAX_SHOWN = 5


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
        taken, (folder, flags, fetch) = stored.get("n_action_steps") or horizon, _editable(case)
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


def check_batch(case: Case) -> Iterator[Finding]:
    """Reads the first batch, as a worker would get it."""
    begin = time.perf_counter()
    case.batch = read_first_batch(case.setup, case.config.num_workers)
    took = time.perf_counter() - begin
    rows, episodes = num_rows(case.batch.rows), len(np.unique(case.batch.rows["episode_index"]))
    yield Finding(
        "pass",
        f"{plural(rows, 'row')} of {plural(episodes, 'episode')} read and prepared in {format_seconds(took)}",
        figures={"rows": rows, "seconds": took},
    )


def read_first_batch(setup: Setup, num_workers: int, most: int = MAX_ROWS) -> FirstBatch:
    """The first rows of rank 0's first micro-batch, in their order."""
    plan, share, rows = setup.data_plan, Share(0, num_workers), min(setup.batch_size, most)
    pieces = []
    for piece in plan_steps(plan.order, share, 0, 1):
        wanted = piece.slots < rows
        if wanted.any():
            pieces.append(replace(piece, frames=piece.frames[wanted], slots=piece.slots[wanted]))
    columns, at = allocate(plan.specs[0], rows), 0
    for unit in make_units(plan, share, pieces):
        read_into(plan.specs[unit.dataset_index], unit, columns, at)
        at += len(unit.frames)
    order = np.argsort(columns[SLOT], kind="stable")
    columns = {key: values[order] for key, values in columns.items()}
    return FirstBatch(columns, apply_all(plan.transforms, columns), tuple(make_prompts(plan.transforms, columns)))


def make_prompts(transforms: Sequence[Transform], columns: Columns) -> Iterator[Prompt]:
    """What the policy is told in each row, and how many tokens that is before any are cut off."""
    at = next((number for number, one in enumerate(transforms) if isinstance(one, Tokenise)), None)
    if at is not None:
        step: Any = transforms[at]
        texts = [str(text) for text in apply_all(transforms[:at], columns)[TASK]]
        tokenizer = load_tokenizer(step.tokenizer_file, NO_LIMIT)
        yield from (
            Prompt(text, len(found.ids)) for text, found in zip(texts, tokenizer.encode_batch(texts), strict=True)
        )
        return
    seen = apply_all(transforms, columns)
    if TOKEN_MASK in seen:  # made in some other way: as far as its mask tells
        counts = seen[TOKEN_MASK].sum(axis=-1).tolist()
        yield from (Prompt(str(text), int(count)) for text, count in zip(columns[TASK], counts, strict=True))


def check_prompts(case: Case) -> Iterator[Finding]:
    """Sentences that are empty, and prompts that are longer than the policy reads."""
    tasks = list(dict.fromkeys(task for meta in case.metas for task in meta.tasks))
    empty = sum(not task.strip() for task in tasks)
    if not case.policy.has_prompt:
        yield Finding("pass", f"the policy reads no sentence; the dataset has {len(tasks)}")
        return
    if empty:
        yield Finding(
            "warn",
            f"{empty} of {plural(len(tasks), 'sentence')} empty: the policy is told nothing there",
            "write them in meta/tasks",
        )
    most = case.batch.seen[TOKEN_MASK].shape[-1] if TOKEN_MASK in case.batch.seen else NO_LIMIT
    longest = max(_all_prompts(case, tasks[:MAX_TASKS]), key=lambda prompt: prompt.tokens)
    figures = {"longest": longest.tokens, "most": most, "sentences": len(tasks)}
    if longest.tokens > most:
        enough = -(-longest.tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
        flags, command = _longer_prompts(case, enough)
        yield Finding(
            "fail",
            f"prompts are cut off: the longest has {longest.tokens} tokens, the policy reads {most}; it ends in '...{longest.text.strip()[-40:]}'",
            f"let it read {enough} tokens, or write shorter sentences in meta/tasks",
            flags,
            command,
            figures=figures,
        )
        return
    yield Finding(
        "pass",
        f"{plural(len(tasks), 'sentence')}; the longest prompt has {longest.tokens} of {most} tokens",
        figures=figures,
    )


def _all_prompts(case: Case, tasks: Sequence[str]) -> Iterator[Prompt]:
    """Every sentence with the states of the first batch, one after the other."""
    yield from case.batch.prompts
    rows, transforms = case.batch.rows, case.setup.eval_transforms(0)
    number = num_rows(rows)
    for begin in range(0, len(tasks), number):
        part = list(tasks[begin : begin + number])
        columns = {key: values[: len(part)] for key, values in rows.items()}
        yield from make_prompts(transforms, columns | {TASK: np.array(part, dtype=object)})


def _editable(case: Case) -> tuple[Path, tuple[str, ...], str]:
    """A folder of the base that may be changed, with the flags and the command that give it: the hub's cache may not."""
    if Path(case.base_path).expanduser().is_dir():
        return case.folder, (), ""
    copy = Path("bases") / Path(case.base_path).name
    return copy, (f"--policy.path={copy}",), f"hf download {case.base_path} --local-dir {copy} && "


def _longer_prompts(case: Case, tokens: int) -> tuple[tuple[str, ...], str]:
    folder, flags, fetch = _editable(case)
    steps = read_object(case.folder, PREPROCESSOR).get("steps", [])
    at = [number for number, step in enumerate(steps) if step.get("registry_name") == "tokenizer_processor"]
    if not at:
        return (), ""
    command = edit_json_command(folder / PREPROCESSOR, [["steps", at[0], "config", "max_length", tokens]])
    if "tokenizer_max_length" in read_object(case.folder, CONFIG):
        command += f" && {edit_json_command(folder / CONFIG, [['tokenizer_max_length', tokens]])}"
    return flags, f"{fetch}{command}"


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


def check_pictures(case: Case) -> Iterator[Finding]:
    """Size and range of the pictures, as read and as the model's first layer gets them."""
    if not case.binding.cameras:
        yield Finding("pass", "the policy looks at no pictures")
        return
    yield from _picture_statistics(case)
    for own, _ in case.binding.cameras:
        pixels = case.batch.rows[own]
        low, high = int(pixels.min()), int(pixels.max())
        if pixels.dtype != np.uint8 or high - low < ONE_COLOUR:
            yield Finding(
                "warn",
                f"camera '{own}': its pictures have one colour ({low} to {high})",
                "look whether the camera was covered",
            )
        elif float((pixels >= WHITE).mean()) > NEARLY_ALL:
            yield Finding("warn", f"camera '{own}': its pictures are nearly white", "look at the recording")
    said = list(_sizes(case))
    if case.seen_range is not None:
        low, high = case.seen_range
        said.append(f"pictures reach the model's first layer from {low:.3g} to {high:.3g}")
        if max(abs(low), abs(high)) > MAX_SCALE:
            remedy = "the policy's adapter must scale them"
            yield Finding("fail", f"{said[-1]}: 0 to 255 where about -1 to 1 is expected", remedy)
            return
        if high - low < MIN_SPREAD:
            yield Finding("fail", f"{said[-1]}: all of them look alike", "correct the statistics of the cameras")
            return
    yield Finding("pass", "; ".join(said), figures={"range": case.seen_range})


def _sizes(case: Case) -> Iterator[str]:
    target = case.policy.image_hw
    for own, _ in case.binding.cameras:
        recorded = case.metas[0].features[own].height_width
        _, _, height, width = letterbox_box(recorded, target, pad=case.policy.pad)
        bars = 1 - height * width / (target[0] * target[1])
        black = f", {format_share(bars)} of it bars" if bars > 0.005 else ""
        yield f"{own} {recorded[0]}x{recorded[1]} as {target[0]}x{target[1]}{black}"


def _picture_statistics(case: Case) -> Iterator[Finding]:
    """Statistics of pictures belong to 0..1; some writers leave them in 0..255, and a picture is then nearly one value."""
    used = case.policy.normalisation.get("VISUAL", "IDENTITY") != "IDENTITY"
    for meta in case.metas:
        wrong = [own for own in meta.cameras if _in_255(meta.stats.get(own, {}))]
        if not wrong:
            continue
        local = meta.root.is_local and meta.version == "v3.0"
        yield Finding(
            "fail" if used else "warn",
            f"dataset '{meta.root.url}': statistics of {', '.join(wrong)} are of pictures in 0..255, expected 0..1"
            + ("" if used else "; this policy does not use them, LeRobot and others do"),
            "divide them by 255",
            command=divide_stats_command(meta.root.join("meta/stats.json"), wrong) if local else "",
        )


def _in_255(stats: Mapping[str, np.ndarray]) -> bool:
    values = [float(np.max(one)) for name, one in stats.items() if name != "count" and one.size]
    return bool(values) and max(values) > 2.0
