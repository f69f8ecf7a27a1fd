"""Checks of a run's data: datasets, names, dims, cameras, episodes, statistics, and the first batch.

They use the functions of a run, so that what they accept, `vlatune train` accepts. Without torch.
"""

import difflib
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vlatune.batch import ACTION, STATE, TASK, TOKEN_MASK, Columns, num_rows
from vlatune.checks.case import MAX_SHOWN, Case, FirstBatch, Prompt, map_flag, with_flags
from vlatune.checks.dataset_checks import SKIP, check_dataset, is_stats_of_255, read_files
from vlatune.config.flags import quote_flags
from vlatune.config.settings import makes_base, makes_small
from vlatune.config.validate import validate
from vlatune.data.features import RESERVED, SELECT_DIMS, narrow_flags, similar_vector, with_dims, with_names
from vlatune.data.frames.resize import letterbox_box
from vlatune.data.health.bad_episodes import check_first, find_bad_episodes, leave_out, without
from vlatune.data.health.timestamps import is_small, with_timestamps
from vlatune.data.meta.dataset_meta import DatasetMeta, check_complete, load_meta
from vlatune.data.order.partition import select_episodes
from vlatune.data.transforms import Transform, apply_all
from vlatune.feed.plan import Share
from vlatune.findings import Finding, Level, finding_of
from vlatune.formatting import format_seconds, format_share, plural
from vlatune.policies.binding import bind_all
from vlatune.policies.tokenizer import MAX_LENGTH, Tokenise
from vlatune.registry import all_recipes, get_policy_info, recipes_for
from vlatune.run_setup import Setup, dataset_roots, join_roots, make_setup, read_specs
from vlatune.storage.remote_fs import parse_storage_options
from vlatune.storage.root import Root
from vlatune.train.data_preview import read_first_rows

POLICY_CHECKS = ("names", "dims", "quantiles")
"""Checks of `inspect` that depend on the policy and the flags of the run; see check_names and check_dims."""
MANY_SKIPPED = 0.2
CLOSE_NAME = 0.6
"""Minimum similarity (difflib) to treat a name as misspelt."""
MAX_ROWS, MAX_TASKS = 32, 2000
"""Maximum number of rows that are read, and of tasks whose prompts are counted."""
NO_LIMIT = 10**6
"""Maximum prompt length for counting tokens."""
TOKEN_MULTIPLE = 8


def check_settings(case: Case) -> Iterator[Finding]:
    config = case.config
    validate(config)
    batch = f"{config.global_batch} samples ({config.num_workers} x {config.batch_size} x {config.grad_accum})"
    steps = plural(config.steps, "optimizer step")
    yield Finding("pass", "settings", f"{config.policy.type}, mode '{config.policy.train}', {steps} of {batch}")


def check_datasets(case: Case) -> Iterator[Finding]:
    """Read meta/ of every dataset."""
    options = parse_storage_options(case.config.dataset.storage_options)
    metas: list[DatasetMeta] = []
    for url in dataset_roots(case.config):
        try:
            meta = load_meta(Root(url, options), argument="--dataset.root")
            check_complete(meta)
        except (ValueError, RuntimeError) as error:
            yield replace(finding_of(error, "dataset"), command=f"vlatune inspect {shlex.quote(url)}")
            continue
        metas.append(meta)
        episodes, cameras = plural(len(meta.episodes), "episode"), plural(len(meta.cameras), "camera")
        text = f"LeRobot {meta.version}, {episodes}, {plural(meta.num_frames, 'frame')} at {meta.fps:g} fps, {cameras}"
        figures = {"version": meta.version, "episodes": len(meta.episodes), "frames": meta.num_frames, "fps": meta.fps}
        yield Finding("pass", "dataset", text, place=url, figures=figures)
    case.metas = tuple(metas)
    rates = sorted({meta.fps for meta in metas})
    if len(rates) > 1:
        text = f"the datasets have {' and '.join(f'{rate:g}' for rate in rates)} fps, so action chunks differ in time"
        yield Finding("warn", "dataset", text, remedy="set --dataset.action_fps, or train on datasets of one rate")


def check_files(case: Case) -> Iterator[Finding]:
    """Run the checks of `vlatune inspect`, except those that other checks do for the run's policy."""
    for meta in case.metas:
        found = check_dataset(meta, read_files(meta, on_file=case.on_file), episodes=False)
        given = [one for one in found if one.flags and with_flags(case.config, one.flags) == case.config]
        found = [one for one in found if one.check not in POLICY_CHECKS and one not in given]
        if not found:
            yield Finding("pass", "files", "files, their rows and headers agree with meta/", place=meta.root.url)
        for one in found:
            if one.level == "fail" and one.flags:
                case.apply(one.flags)
            place = f"{meta.root.url}, {one.place}" if one.place else meta.root.url
            yield replace(one, place=place, examples=one.examples[:MAX_SHOWN])


def check_names(case: Case) -> Iterator[Finding]:
    """Check that state and action exist under the names that policies expect."""
    config = case.config
    names: dict[str, str] = {}
    metas = _renamed(case)
    for meta in metas:
        vectors = [name for name in meta.features if name not in meta.cameras and name not in RESERVED]
        for key in (ACTION, STATE):
            if meta.own(key) in meta.features:
                continue
            likely = similar_vector(key, vectors)
            if likely is None:
                text, remedy = f"there is no feature '{key}'", "name the feature that holds it with --rename_map"
                expected = f"one of {', '.join(meta.features)} is the {key}"
                yield Finding("fail", "features", text, place=meta.root.url, expected=expected, remedy=remedy)
                return
            names[likely] = key
    if names:
        flags = (map_flag({**config.rename_map, **names}),)
        case.apply(flags)
        metas = _renamed(case)
        text = "features have other names: " + ", ".join(f"'{own}' may be '{name}'" for own, name in names.items())
        yield Finding("fail", "features", text, remedy="rename them", flags=flags)
    else:
        yield Finding("pass", "features", f"'{ACTION}' and '{STATE}' exist")
    case.metas = with_dims(metas, config.dataset.select_dims, SELECT_DIMS)
    if makes_base(case.config):  # the base model is created for these dims, so check them first
        most = get_policy_info(case.config.policy.type).max_dims
        for one in [one for key in (STATE, ACTION) for one in _too_wide(case, key, {STATE: most, ACTION: most})][:1]:
            case.apply(one.flags)
            yield one


def _renamed(case: Case) -> tuple[DatasetMeta, ...]:
    names = ("--rename_map", "--dataset.rename_map")
    return with_names(case.metas, case.config.rename_map, case.config.dataset.rename_map, what=names)


def check_dims(case: Case) -> Iterator[Finding]:
    """Check the widths of state and action."""
    limits = {STATE: case.policy.max_state_dim, ACTION: case.policy.max_action_dim}
    for key in limits:
        if wide := _too_wide(case, key, limits):
            yield from wide
            continue
        feature = case.metas[0].features[case.metas[0].own(key)]
        names = f": {', '.join(feature.names)}" if feature.names else " without names"
        text = f"{key}: {feature.shape[0] if feature.shape else 0} dims{names}"
        yield Finding("pass", "dims", text, figures={"dims": list(feature.shape)})


def _too_wide(case: Case, key: str, limits: Mapping[str, int]) -> list[Finding]:
    """Return a finding for the first dataset with more dims than the policy supports."""
    for meta in case.metas:
        width, most = int(np.prod(meta.features[meta.own(key)].shape)), limits[key]
        if width <= most:
            continue
        select, other = narrow_flags(case.metas, limits), _wider_policy(case, width)
        remedy = "use some of the dims, such as the first"
        return [
            Finding(
                "fail",
                "dims",
                f"'{meta.own(key)}' has {width} dims",
                place=meta.root.url,
                expected=f"at most {most}, which the policy takes",
                remedy=f"{remedy} ({quote_flags(select)}), or train a policy that takes as many" if other else remedy,
                flags=other or select,
                figures={"dims": width, "most": most},
            )
        ]
    return []


def _wider_policy(case: Case, width: int) -> tuple[str, ...]:
    """Return the flags of the first recipe whose base supports `width` dims and is valid here."""
    for name in recipes_for(width, small=makes_small(case.config), mixed=len(case.metas) > 1):
        policy = all_recipes()[name].config.policy
        words = (f"--recipe={name}", f"--policy.type={policy.type}", f"--policy.train={policy.train}")
        flags = (*words, "--policy.path=null", "--policy.dtype=null")
        try:
            validate(with_flags(case.config, flags))
        except ValueError:
            continue
        return flags
    return ()


def check_cameras(case: Case) -> Iterator[Finding]:
    """Check the cameras, and suggest a rename map for cameras that the policy lacks."""
    policy = case.policy
    if not policy.fixed_inputs:  # check_dims reports widths
        policy = replace(policy, max_state_dim=10**9, max_action_dim=10**9)
    maps = [_camera_map(policy.cameras, meta) for meta in case.metas]
    flags = _map_flags(case, maps) if any(maps) else ()
    pairs = dict.fromkeys(f"'{own}' may be '{name}'" for names in maps for own, name in names.items())
    is_mistake = bool(flags) and _is_mistake(case, maps)
    if is_mistake:
        case.apply(flags)
        case.metas = _renamed(case)
    bindings = bind_all(policy, case.metas)
    joint = join_roots(case.config, case.adapter, policy, case.metas, bindings)  # raises if cameras do not match
    used = ", ".join(own if own == name else f"{own} as {name}" for own, name in joint.cameras) or "none"
    masked = f"; without images: {', '.join(joint.missing_cameras)}" if joint.missing_cameras else ""
    figures = {"missing": list(joint.missing_cameras)}
    if is_mistake:
        text = f"the policy and the dataset name cameras differently: {', '.join(pairs)}"
        remedy = "rename them; correct the map where a camera shows something else"
        yield Finding("fail", "cameras", text, remedy=remedy, flags=flags, figures=figures)
    elif flags:
        unused = ", ".join(dict.fromkeys(own for names in maps for own in names))
        text, remedy = f"{used}{masked}; unused: {unused}", "rename the unused cameras if this is not intended"
        yield Finding("warn", "cameras", text, remedy=remedy, flags=flags, figures=figures)
    else:
        yield Finding("pass", "cameras", f"{used}{masked}", figures=figures)


def _is_mistake(case: Case, maps: Sequence[Mapping[str, str]]) -> bool:
    """True if a name nearly matches, or a dataset has none of the policy's cameras."""
    close = any(_similarity(own, name) >= CLOSE_NAME for names in maps for own, name in names.items())
    known = [{meta.names.get(own, own) for own in meta.cameras} & {*case.policy.cameras} for meta in case.metas]
    return close or not all(known)


def _camera_map(wanted: Sequence[str], meta: DatasetMeta) -> dict[str, str]:
    """Map unused colour cameras to cameras that the policy lacks, by similarity of names."""
    names = {own: meta.names.get(own, own) for own in meta.cameras if not meta.features[own].is_depth}
    lacking = [name for name in wanted if name not in names.values() and ".empty_camera_" not in name]
    unused = [own for own, name in names.items() if name not in wanted]
    scores = {(own, name): _similarity(own, name) for own in unused for name in lacking}
    found: dict[str, str] = {}
    for own, name in sorted(scores, key=lambda pair: -scores[pair]):
        if own not in found and name not in found.values():
            found[own] = name
    return found


def _similarity(own: str, name: str) -> float:
    """Return the similarity of two names in 0..1, the lower of full names and last parts."""
    parts = [one.replace("/", ".").split(".")[-1] for one in (own, name)]
    return min(difflib.SequenceMatcher(None, a, b).ratio() for a, b in ((own, name), parts))


def _map_flags(case: Case, maps: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Return one rename map if it fits all datasets, else one per dataset."""
    common = {own: name for names in maps for own, name in names.items()}
    fits = all(
        {own: name for own, name in common.items() if own in meta.features} == dict(names)
        for meta, names in zip(case.metas, maps, strict=True)
    )
    if fits and not case.config.dataset.rename_map:
        return (map_flag({**case.config.rename_map, **common}),)
    given = case.config.dataset.rename_map or [{}] * len(maps)
    return tuple(map_flag({**own, **names}, "--dataset.rename_map") for own, names in zip(given, maps, strict=True))


def check_episodes(case: Case) -> Iterator[Finding]:
    """Check rows and mp4 files of the selected episodes, if large only of the first episode."""
    dataset = case.config.dataset
    bindings = bind_all(case.policy, case.metas)
    case.binding = join_roots(case.config, case.adapter, case.policy, case.metas, bindings)
    specs = read_specs(case.config, case.metas, case.policy, bindings, case.binding)
    selected = select_episodes(case.metas, dataset.episodes, dataset.exclude_episodes)
    case.specs, _ = with_timestamps(case.metas, specs, selected, dataset.timestamps)
    skips, number = dataset.on_bad_episode == "skip", plural(len(selected), "episode")
    if not (skips or is_small(case.metas, selected)):
        check_first(case.metas, case.specs, selected)
        case.usable = (selected, ())
        yield Finding("pass", "episodes", f"{number}; all files exist, and the first episode agrees with meta/")
        return
    bad = find_bad_episodes(case.metas, case.specs, selected, on_file=case.on_file)
    case.usable = (leave_out(selected, case.metas, bad), bad)
    case.metas = without(case.metas, bad)
    figures = {"bad": len(bad), "episodes": len(selected)}
    if not bad:
        yield Finding("pass", "episodes", f"every row and packet of {number} is readable", figures=figures)
        return
    first, _, remedy = bad[0].reason.partition("; ")
    text = f"{len(bad)} of {number} cannot be used: {first}"
    if skips:
        level: Level = "warn" if len(bad) > MANY_SKIPPED * len(selected) else "pass"
        yield Finding(level, "episodes", f"left out: {text}", remedy="record or convert them again", figures=figures)
        return
    case.apply((SKIP,))
    yield Finding("fail", "episodes", text, remedy=remedy, flags=(SKIP,), figures=figures)


def check_samples(case: Case) -> Iterator[Finding]:
    """Build the setup of `vlatune train`: held-out episodes, statistics, lanes, batches per epoch."""
    case.setup = setup = make_setup(case.run_config(), case.metas, usable=case.usable)
    steps = setup.order.batches_per_epoch
    epochs = case.config.steps / steps
    training = plural(len(setup.training), "episode")
    text = f"{training} to train on, {len(setup.held_out)} held out; {steps:,} steps per epoch, {epochs:.3g} epochs"
    figures = {"steps_per_epoch": steps, "epochs": epochs, "held_out": len(setup.held_out)}
    yield Finding("pass", "samples", text, figures=figures)


def check_batch(case: Case) -> Iterator[Finding]:
    """Read the first batch as a worker would get it."""
    begin = time.perf_counter()
    case.batch = read_first_batch(case.setup, case.config.num_workers)
    seconds = time.perf_counter() - begin
    rows, episodes = num_rows(case.batch.rows), len(np.unique(case.batch.rows["episode_index"]))
    text = f"{plural(rows, 'row')} of {plural(episodes, 'episode')} read and prepared in {format_seconds(seconds)}"
    yield Finding("pass", "first batch", text, figures={"rows": rows, "seconds": seconds})


def read_first_batch(setup: Setup, num_workers: int) -> FirstBatch:
    """Read the first rows of rank 0's first micro-batch, in order."""
    plan = setup.data_plan
    columns = read_first_rows(setup, plan.specs, Share(0, num_workers), min(setup.batch_size, MAX_ROWS))
    prompts = tuple(_make_prompts(setup.training_transforms(), columns))
    return FirstBatch(columns, apply_all(plan.transforms, columns), prompts)


def _make_prompts(transforms: Sequence[Transform], columns: Columns) -> Iterator[Prompt]:
    """Yield each row's prompt with its number of tokens before truncation."""
    for at, step in enumerate(transforms):
        if isinstance(step, Tokenise):
            texts = [str(text) for text in apply_all(transforms[:at], columns)[TASK]]
            encoded = step.tokenizer.encode(texts, NO_LIMIT)
            yield from (Prompt(text, len(ids)) for text, ids in zip(texts, encoded, strict=True))


def check_prompts(case: Case) -> Iterator[Finding]:
    """Check for empty tasks and for prompts that would be truncated."""
    tasks = list(dict.fromkeys(task for meta in case.metas for task in meta.tasks))
    number, empty = plural(len(tasks), "task"), sum(not task.strip() for task in tasks)
    if not case.batch.prompts:
        yield Finding("pass", "prompts", f"the policy tokenises no instruction; the dataset has {number}")
        return
    if empty:
        yield Finding("warn", "prompts", f"{empty} of {number} empty", remedy="write them in meta/tasks")
    most = case.batch.inputs[TOKEN_MASK].shape[-1]
    longest = max(_all_prompts(case, case.batch, tasks[:MAX_TASKS]), key=lambda prompt: prompt.tokens)
    figures = {"longest": longest.tokens, "most": most, "tasks": len(tasks)}
    if longest.tokens <= most:
        text = f"{number}; the longest prompt has {longest.tokens} of {most} tokens"
        yield Finding("pass", "prompts", text, figures=figures)
        return
    enough = -(-longest.tokens // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    has_flag = MAX_LENGTH in get_policy_info(case.config.policy.type).option_defaults
    yield Finding(
        "fail",
        "prompts",
        f"prompts are truncated: the longest has {longest.tokens} tokens ('...{longest.text.strip()[-40:]}')",
        expected=f"at most {most} tokens, which the policy reads",
        remedy=f"let it read {enough} tokens, or write shorter tasks in meta/tasks",
        flags=(f"--policy.{MAX_LENGTH}={enough}",) if has_flag else (),
        figures=figures,
    )


def _all_prompts(case: Case, batch: FirstBatch, tasks: Sequence[str]) -> Iterator[Prompt]:
    """Yield the prompts of every task, with the states of the first batch."""
    yield from batch.prompts
    transforms, number = case.setup.eval_transforms(0), num_rows(batch.rows)
    for begin in range(0, len(tasks), number):
        part = list(tasks[begin : begin + number])
        columns = {key: values[: len(part)] for key, values in batch.rows.items()}
        yield from _make_prompts(transforms, columns | {TASK: np.array(part, dtype=object)})


def check_images(case: Case) -> Iterator[Finding]:
    """Check statistics and size of images."""
    if not case.binding.cameras:
        yield Finding("pass", "images", "the policy takes no images")
        return
    if case.policy.normalisation.get("VISUAL", "IDENTITY") != "IDENTITY":
        for meta in case.metas:
            if wrong := [own for own in meta.cameras if is_stats_of_255(meta.stats.get(own, {}))]:
                text = f"statistics of {', '.join(wrong)} are of images in 0..255"
                remedy = "divide them by 255 in meta/stats.json"
                yield Finding("fail", "images", text, place=meta.root.url, expected="0..1", remedy=remedy)
    target, sizes = case.policy.image_hw, []
    for own, _ in case.binding.cameras:
        recorded = case.metas[0].features[own].height_width
        _, _, height, width = letterbox_box(recorded, target, pad=case.policy.pad)
        padding = 1 - height * width / (target[0] * target[1])
        padded = f", {format_share(padding)} padding" if padding > 0.005 else ""
        sizes.append(f"{own} {recorded[0]}x{recorded[1]} as {target[0]}x{target[1]}{padded}")
    yield Finding("pass", "images", "; ".join(sizes))
