"""The datasets of a run, by themselves and against the policy: files, rate, names, cameras, dims, episodes, statistics.

What `vlatune inspect` finds in files is taken from it; what a run would refuse is refused by the same functions as there.
"""

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import cv2
import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.config import validate
from vlatune.dataset.features import RESERVED, likely_name, with_names
from vlatune.dataset.health.bad_episodes import check_first, find_bad_episodes, leave_out, without
from vlatune.dataset.health.row_checks import check_kinds
from vlatune.dataset.health.stats_check import RowsSeen, check_stats, doubts, look_at_rows
from vlatune.dataset.meta.dataset_meta import DatasetMeta, check_complete, load_meta
from vlatune.dataset.meta.stats import feature_stats, has_stats
from vlatune.dataset.order.partition import select_episodes
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.dataset.storage.remote_fs import parse_storage_options
from vlatune.dataset.storage.root import Root
from vlatune.dataset.storage.tables import read_columns
from vlatune.doctor.findings import Case, Finding, edit_json_command, map_flag, refused
from vlatune.files import parse_json
from vlatune.inspect.inspection import inspect_dataset
from vlatune.inspect.problems import Problem
from vlatune.policies.base import bind, join_bindings, stats_needed
from vlatune.policies.registry import all_recipes, get_policy
from vlatune.report.formatting import plural
from vlatune.run_setup import dataset_roots, make_setup, read_specs

INFO = "meta/info.json"
COMPUTED, SKIP = "--dataset.stats=computed", "--dataset.on_bad_episode=skip"
MAX_SHOWN = 5
WHOLE_FRAMES = 200_000
"""Local datasets of up to so many frames are looked at row by row and packet by packet: some ten seconds."""
RATE_SHARE = 0.01
CLOSE_NAME = 0.6
"""Likeness (difflib) from which a name is taken to be misspelt."""
MANY_SKIPPED = 0.2
LOOKED_AT = 24
"""Frames of a root whose cameras are compared with another root's."""
SIDE, CHANNELS = 12, 3
SWAP_GAIN = 0.5
"""How much nearer the cameras of two datasets must be to each other, crosswise, before they are called swapped."""


def check_settings(case: Case) -> Iterator[Finding]:
    config = case.config
    validate(config)
    yield Finding(
        "pass",
        f"{config.policy.type}, training '{config.policy.train}', {plural(config.steps, 'optimizer step')} of {config.global_batch} samples "
        f"({config.num_workers} x {config.batch_size} x {config.grad_accum})",
        figures={"global_batch": config.global_batch},
    )


def check_datasets(case: Case) -> Iterator[Finding]:
    """meta/ of every root: its version, and that its parts agree."""
    options = parse_storage_options(case.config.dataset.storage_options)
    metas: list[DatasetMeta] = []
    for url in dataset_roots(case.config):
        try:
            meta = load_meta(Root(url, options), argument="--dataset.root")
            check_complete(meta)
        except (ValueError, RuntimeError) as error:
            yield refused(error, command=f"vlatune inspect {shlex.quote(url)}")
            continue
        metas.append(meta)
        episodes, cameras = len(meta.episodes), len(meta.cameras)
        yield Finding(
            "pass",
            f"{url}: LeRobot {meta.version}, {plural(episodes, 'episode')}, {plural(meta.num_frames, 'frame')}, {plural(cameras, 'camera')}",
            figures={"version": meta.version, "episodes": episodes, "frames": meta.num_frames},
        )
    case.metas = tuple(metas)


def check_fps(case: Case) -> Iterator[Finding]:
    """The rate that info.json names against the rows' own times."""
    metas = []
    for meta in case.metas:
        found = row_rate(meta)
        if found is None or not has_other_rate(meta):
            metas.append(meta)
            yield Finding("pass", f"{meta.root.url}: {meta.fps:g} fps, as the rows' times", figures={"fps": meta.fps})
            continue
        rate = round(found) if abs(round(found) - found) <= RATE_SHARE * found else round(found, 3)
        edits = _rate_edits(meta, rate)
        yield Finding(
            "fail",
            f"{meta.root.url}: {INFO} says {meta.fps:g} fps, the rows lie {1 / found:.4g} s apart, which is {rate:g} fps",
            f"set fps to {rate:g} in {INFO}; a chunk of actions would be {rate / meta.fps:.3g} times as long as it is meant to be",
            command=edit_json_command(meta.root.join(INFO), edits) if meta.root.is_local else "",
            figures={"fps": meta.fps, "rows_fps": found},
            amended=True,
        )
        metas.append(_at_rate(meta, rate, edits))
    case.metas = tuple(metas)
    rates = {meta.fps for meta in case.metas}
    if len(rates) > 1:
        yield Finding(
            "warn",
            f"the datasets have {' and '.join(f'{rate:g}' for rate in sorted(rates))} fps: the same chunk of actions is a different time in each",
            "train on those of one rate, or resample the others",
        )


def row_rate(meta: DatasetMeta) -> float | None:
    """Frames per second by the timestamps of the first data file; None where it has no two rows of an episode."""
    columns = read_columns(meta.root, meta.data_path(0), ["timestamp", "frame_index", "episode_index"])
    check_kinds(f"dataset '{meta.root.url}': {meta.data_path(0)}", columns)
    follows = (np.diff(columns["frame_index"]) == 1) & (np.diff(columns["episode_index"]) == 0)
    apart_s = np.diff(columns["timestamp"].astype(np.float64))[follows]
    apart_s = apart_s[np.isfinite(apart_s) & (apart_s > 0)]
    return 1 / float(np.median(apart_s)) if len(apart_s) else None


def has_other_rate(meta: DatasetMeta) -> bool:
    """Whether the rows lie further apart, or nearer, than info.json's rate has it."""
    found = row_rate(meta)
    return found is not None and abs(found - meta.fps) > RATE_SHARE * meta.fps


def _rate_edits(meta: DatasetMeta, rate: float) -> list[list[Any]]:
    """fps, and that of each camera whose declared rate is the wrong one, too."""
    edits: list[list[Any]] = [["fps", rate]]
    features = parse_json(meta.root.read_bytes(INFO), INFO).get("features", {})
    for name in meta.cameras:
        for holder in ("info", "video_info"):
            said = features.get(name, {}).get(holder)
            declared = said if isinstance(said, dict) else {}
            wrong = [key for key in ("video.fps", "fps") if declared.get(key) == meta.fps]
            edits += [["features", name, holder, key, rate] for key in wrong]
    return edits


def _at_rate(meta: DatasetMeta, rate: float, edits: Sequence[Sequence[Any]]) -> DatasetMeta:
    """As it will be read once it is mended."""
    features = dict(meta.features)
    for edit in edits[1:]:
        feature = features[edit[1]]
        features[edit[1]] = replace(feature, info={**feature.info, edit[3]: rate})
    return replace(meta, fps=float(rate), features=features)


def check_files(case: Case) -> Iterator[Finding]:
    """Data files and videos against meta/, as `vlatune inspect` looks at them."""
    for meta in case.metas:
        problems = [one for one in inspect_dataset(meta.root).problems if is_of_files(one)]
        if meta.fps != load_meta(meta.root).fps:  # told by check_fps
            problems = [one for one in problems if " fps" not in one.expected]
        for problem in problems[:MAX_SHOWN]:
            examples = f" ({problem.examples[0]}{', ...' if problem.count > 1 else ''})" if problem.examples else ""
            yield Finding(
                "fail" if problem.severity == "error" else "warn",
                f"{meta.root.url}: {problem.place}: {problem.found}{examples}; expected {problem.expected}",
                problem.fix,
                command=f"vlatune inspect {shlex.quote(meta.root.url)}",
                figures={"count": problem.count},
            )
        if not problems:
            yield Finding("pass", f"{meta.root.url}: files, their rows and headers are as meta/ says")


def is_of_files(problem: Problem) -> bool:
    """Names, widths and statistics have checks of their own here, which know the policy."""
    told = ("statistics", "meta/stats.json", "meta/episodes_stats", f"{INFO}, feature", "data files, feature")
    return not problem.flag and not problem.place.startswith(told) and not problem.found.startswith("no ")


def check_names(case: Case) -> Iterator[Finding]:
    """That state and action are there, under the names that policies ask for."""
    config = case.config
    wanted: dict[str, str] = {}
    lost: list[str] = []
    metas = _named(case)
    for meta in metas:
        vectors = [name for name in meta.features if name not in meta.cameras and name not in RESERVED]
        for key in (ACTION, STATE):
            if meta.own(key) in meta.features:
                continue
            likely = likely_name(key, vectors) or next(iter(difflib.get_close_matches(key, vectors, 1, 0.4)), None)
            if likely is None:
                lost.append(f"dataset '{meta.root.url}': no feature '{key}'; it has {', '.join(meta.features)}")
            else:
                wanted[likely] = key
    if lost:
        yield Finding("fail", lost[0], "record it, or name the feature that holds it with --rename_map")
        return
    if wanted:
        flags = (map_flag({**config.rename_map, **wanted}),)
        case.amend(flags)
        metas = _named(case)
        said = ", ".join(f"'{own}' may be '{name}'" for own, name in wanted.items())
        yield Finding("fail", f"features have other names than policies ask for: {said}", flags=flags, amended=True)
    else:
        yield Finding("pass", f"'{ACTION}' and '{STATE}' are there")
    case.metas = metas


def _named(case: Case) -> tuple[DatasetMeta, ...]:
    config = case.config
    what = ("--rename_map", "--dataset.rename_map")
    return with_names(case.metas, config.rename_map, config.dataset.rename_map, what=what)


def check_dims(case: Case) -> Iterator[Finding]:
    """Widths of state and action against the policy's, and their names."""
    for key, most in ((STATE, case.policy.max_state_dim), (ACTION, case.policy.max_action_dim)):
        features = [meta.features[meta.own(key)] for meta in case.metas]
        for meta, feature in zip(case.metas, features, strict=True):
            width = int(np.prod(feature.shape))
            if width > most:
                flags = _wider_policy(width)
                remedy = (
                    "train a policy that is made for the dataset's dims" if flags else "leave dims out of the dataset"
                )
                yield Finding(
                    "fail",
                    f"dataset '{meta.root.url}': '{meta.own(key)}' has {width} dims, the policy takes {most} at most",
                    remedy,
                    flags,
                    figures={"dims": width, "most": most},
                )
                break
        else:
            yield from _named_dims(key, case.metas, [feature.names for feature in features], features[0].shape)


def _named_dims(
    key: str, metas: Sequence[DatasetMeta], names: Sequence[Sequence[str] | None], shape: tuple[int, ...]
) -> Iterator[Finding]:
    for meta, other in zip(metas[1:], names[1:], strict=True):
        if other and names[0] and tuple(other) != tuple(names[0]):
            pairs = [f"{a} and {b}" for a, b in zip(names[0], other, strict=False) if a != b]
            yield Finding(
                "warn",
                f"{key}: dims of '{metas[0].root.url}' and '{meta.root.url}' have other names: {', '.join(pairs[:MAX_SHOWN])}",
                "check that both robots mean the same by each dim, or leave one of the datasets out",
            )
            return
    said = f": {', '.join(names[0])}" if names[0] else " without names"
    yield Finding("pass", f"{key}: {shape[0] if shape else 0} dims{said}", figures={"dims": list(shape)})


def _wider_policy(width: int) -> tuple[str, ...]:
    """Flags of a recipe that makes its own base for that many dims; none where no policy does."""
    cards = {name: get_policy(recipe.values["policy"]["type"]) for name, recipe in all_recipes().items()}
    for name in sorted(cards, key=lambda one: cards[one].fetches_start):  # first those that need nothing from a hub
        recipe, card = all_recipes()[name], cards[name]
        if (card.from_scratch or recipe.small) and card.max_dims >= width:
            way = recipe.values["policy"].get("train", next(iter(card.train_ways)))
            return (
                f"--recipe={name}",
                f"--policy.type={card.type}",
                f"--policy.train={way}",
                "--policy.path=null",
                "--policy.dtype=null",
            )
    return ()


def check_cameras(case: Case) -> Iterator[Finding]:
    """Cameras against the policy's, with the map that would give it those that it lacks."""
    wide = case.policy  # one with fixed inputs has exact dims
    if not wide.fixed_inputs:
        wide = replace(wide, max_state_dim=10**9, max_action_dim=10**9)
    maps = [_camera_map(case.policy.cameras, meta) for meta in case.metas]
    flags = _map_flags(case, maps) if any(maps) else ()
    if flags and _is_mistake(case, maps):
        case.amend(flags)
        case.metas = _named(case)
        bound = [bind(wide, meta, meta.names) for meta in case.metas]
        join_bindings(case.metas, bound)  # refuses what the map does not mend
        pairs = [f"'{own}' may be '{name}'" for names in maps for own, name in names.items()]
        yield Finding(
            "fail",
            f"cameras of the policy get no pictures, and cameras of the dataset go unused: {', '.join(dict.fromkeys(pairs))}",
            "correct the map where a camera shows something else",
            flags,
            amended=True,
            figures={"policy": list(case.policy.cameras), "dataset": list(case.metas[0].cameras)},
        )
        return
    bound = [bind(wide, meta, meta.names) for meta in case.metas]
    joint = join_bindings(case.metas, bound)
    said = ", ".join(own if own == name else f"{own} as {name}" for own, name in joint.cameras) or "none"
    masked = f"; the policy's others are masked: {', '.join(joint.missing_cameras)}" if joint.missing_cameras else ""
    figures = {"missing": list(joint.missing_cameras)}
    if flags:
        unused = ", ".join(dict.fromkeys(own for names in maps for own in names))
        yield Finding(
            "warn", f"{said}{masked}, and {unused} goes unused", "where that is not meant", flags, figures=figures
        )
        return
    yield Finding("pass", f"{said}{masked}", figures=figures)


def _is_mistake(case: Case, maps: Sequence[Mapping[str, str]]) -> bool:
    """A name that is nearly the policy's, or not one camera that the policy knows; else it may be meant so."""
    close = any(_alike(own, name) >= CLOSE_NAME for names in maps for own, name in names.items())
    known = [{meta.names.get(own, own) for own in meta.cameras} & {*case.policy.cameras} for meta in case.metas]
    return close or not all(known)


def _camera_map(wanted: Sequence[str], meta: DatasetMeta) -> dict[str, str]:
    """Unused colour cameras of a dataset -> cameras that the policy lacks: by their names, then by their order."""
    called = {own: meta.names.get(own, own) for own in meta.cameras if not meta.features[own].is_depth}
    lacking = [name for name in wanted if name not in called.values() and ".empty_camera_" not in name]
    free = [own for own, name in called.items() if name not in wanted]
    scores = {(own, name): _alike(own, name) for own in free for name in lacking}
    found: dict[str, str] = {}
    for own, name in sorted(scores, key=lambda pair: -scores[pair]):
        if own not in found and name not in found.values():
            found[own] = name
    return found


def _alike(own: str, name: str) -> float:
    """Of two names, 0 to 1: as they are, or their last parts alone."""
    ours, theirs = (one.replace("/", ".").split(".")[-1] for one in (own, name))
    whole, last = difflib.SequenceMatcher(None, own, name), difflib.SequenceMatcher(None, ours, theirs)
    return min(whole.ratio(), last.ratio())


def _map_flags(case: Case, maps: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """One map for all where the datasets do not contradict each other, else one for each."""
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
    """Rows and mp4 files of the wanted episodes: all of a small local dataset, else the first and what is missing."""
    case.bindings = [bind(case.policy, meta, meta.names) for meta in case.metas]
    case.binding = join_bindings(case.metas, case.bindings)
    case.specs = read_specs(case.config, case.metas, case.policy, case.bindings, case.binding)
    selected = select_episodes(case.metas, case.config.dataset.episodes)
    asked = case.config.dataset.on_bad_episode == "skip"
    small = all(meta.root.is_local for meta in case.metas) and int(selected.length.sum()) <= WHOLE_FRAMES
    if not (asked or small):
        check_first(case.metas, case.specs, selected)
        case.usable = (selected, ())
        yield Finding(
            "pass", f"{plural(len(selected), 'episode')}; all files are there, and the first is as meta/ says"
        )
        return
    bad = find_bad_episodes(case.metas, case.specs, selected)
    case.usable = (leave_out(selected, case.metas, bad), bad)
    case.metas = without(case.metas, bad)
    figures = {"bad": len(bad), "episodes": len(selected)}
    if not bad:
        yield Finding("pass", f"every row and packet of {plural(len(selected), 'episode')} looked at", figures=figures)
        return
    first, _, remedy = bad[0].reason.partition("; ")
    said = f"{len(bad)} of {len(selected)} episodes cannot be used: {first}"
    if asked:
        status = "warn" if len(bad) > MANY_SKIPPED * len(selected) else "pass"
        yield Finding(
            status, f"left out: {said}", "record or convert them anew" if status == "warn" else "", figures=figures
        )
        return
    case.amend([SKIP])
    yield Finding("fail", said, remedy, (SKIP,), amended=True, figures=figures)


def check_statistics(case: Case) -> Iterator[Finding]:
    """Those that normalise: present, finite, and apart from each other."""
    if not stats_needed(case.policy):
        yield Finding("pass", "the policy takes state and action as they are")
    for key, names in stats_needed(case.policy).items():
        metas, what = case.metas, " and ".join(names)
        computed = case.config.dataset.stats == "computed"
        if not computed and len(metas) == 1 and not has_stats(metas, key, names):
            case.amend([COMPUTED])
            yield Finding(
                "warn",
                f"{key}: the dataset's statistics have no {what}, which the policy normalises with; they are computed from all "
                f"rows at every start, and LeRobot itself would refuse the dataset",
                "say so, or write them with LeRobot",
                (COMPUTED,),
                amended=True,
            )
            computed = True
        case.stats[key] = feature_stats(metas, key, names, computed=computed)
        yield from _sane_statistics(case, key, names, computed=computed or not has_stats(metas, key, names))


def _sane_statistics(case: Case, key: str, names: Sequence[str], *, computed: bool) -> Iterator[Finding]:
    meta = case.metas[0]
    feature, where = meta.features[meta.own(key)], f"dataset '{meta.root.url}'"
    width = int(np.prod(feature.shape))
    try:
        warnings = check_stats(where, key, case.stats[key], feature.names, width=width)
    except ValueError as error:
        yield refused(error, flags=() if computed else (COMPUTED,))
        return
    if not warnings:
        kind = "computed from all rows" if computed else "the dataset's own"
        yield Finding("pass", f"{key}: {' and '.join(names)} of all {width} dims, {kind}")
        return
    found, _, remedy = warnings[0].partition("; ")
    exact = None if computed else feature_stats(case.metas, key, names, computed=True)
    if exact is not None and len(check_stats(where, key, exact, feature.names, width=width)) < len(warnings):
        case.amend([COMPUTED])
        case.stats[key] = exact
        told = f"{found}, but the rows do vary: the statistics are wrong"
        yield Finding(
            "fail", told, "take those of all rows", (COMPUTED,), amended=True, figures={"dims": len(warnings)}
        )
        return
    yield Finding("warn", found, remedy, figures={"dims": len(warnings)})


def check_values(case: Case) -> Iterator[Finding]:
    """The rows against the statistics: what is not finite, and what lies outside."""
    if not case.stats:
        yield Finding("pass", "no statistics to hold the rows against")
    for key, stats in case.stats.items():
        for meta in case.metas:
            feature = meta.features[meta.own(key)]
            seen = look_at_rows(meta, meta.own(key), stats)
            if seen is None:
                continue
            if seen.not_finite:
                yield Finding(
                    "fail",
                    f"dataset '{meta.root.url}': {key}: values that are not finite numbers: {', '.join(seen.not_finite)}",
                    "record or convert these episodes anew, or leave them out",
                    (SKIP,),
                )
                continue
            told = list(doubts(stats, seen, feature.names))
            yield from _outside(case, meta, key, seen, told)


def _outside(
    case: Case, meta: DatasetMeta, key: str, seen: RowsSeen, told: Sequence[tuple[str, Sequence[str]]]
) -> Iterator[Finding]:
    share = max((float(part.max()) for part in seen.outside.values() if part.size), default=0.0)
    figures = {"rows": seen.num_rows, "most_outside": share}
    if told and len(case.metas) == 1 and case.config.dataset.stats != "computed":
        what, dims = told[0]
        said = f"dataset '{meta.root.url}': {key}: {what}: {', '.join(dims[:MAX_SHOWN])}"
        yield Finding("warn", said, "take statistics of all rows", (COMPUTED,), figures=figures)
        return
    pair = next(iter(seen.outside), None)
    outside = f", at most {100 * share:.2g} % of a dim outside {pair[0]} and {pair[1]}" if pair else ""
    yield Finding("pass", f"{key}: {plural(seen.num_rows, 'row')} looked at, all finite{outside}", figures=figures)


def check_samples(case: Case) -> Iterator[Finding]:
    """The set-up as `vlatune train` makes it: episodes held out, lanes, batches of an epoch."""
    case.setup = make_setup(case.run_config(), case.metas, usable=case.usable)
    order = case.setup.order
    epochs = case.config.steps / order.batches_per_epoch
    yield Finding(
        "pass",
        f"{plural(len(case.setup.training), 'episode')} to train on, {len(case.setup.held_out)} held out; {order.batches_per_epoch:,} "
        f"steps an epoch, {epochs:.3g} epochs",
        figures={"steps_per_epoch": order.batches_per_epoch, "epochs": epochs, "held_out": len(case.setup.held_out)},
    )


def check_roots(case: Case) -> Iterator[Finding]:
    """Whether the cameras of further datasets show what those of the first one show."""
    if len(case.metas) < 2 or len(case.binding.cameras) < 2:
        yield Finding("pass", "one dataset, or one camera: nothing to mix up")
        return
    targets = [name for _, name in case.binding.cameras]
    first = _looks(case, 0)
    maps: list[dict[str, str]] = [dict(one) for one in case.config.dataset.rename_map] or [{} for _ in case.metas]
    swapped: list[str] = []
    for number in range(1, len(case.metas)):
        other = _looks(case, number)
        order = best_match(first, other)
        own = {name: camera for camera, name in case.bindings[number].cameras}
        for place, found in enumerate(order):
            if found != place:
                maps[number][own[targets[found]]] = targets[place]
                swapped.append(
                    f"'{own[targets[found]]}' of '{case.metas[number].root.url}' looks like '{targets[place]}'"
                )
    if not swapped:
        yield Finding("pass", f"the cameras of {len(case.metas)} datasets look like each other")
        return
    yield Finding(
        "warn",
        f"cameras are swapped between the datasets: {', '.join(swapped)}, where '{case.metas[0].root.url}' is right",
        "look at the pictures on the page; if so",
        tuple(map_flag(one, "--dataset.rename_map") for one in maps),
    )


def _looks(case: Case, number: int) -> np.ndarray:
    """Small pictures (cameras, frames, SIDE * SIDE * 3) of frames that are spread over a dataset, by the policy's names."""
    meta, spec = case.metas[number], case.specs[number]
    chosen = np.unique(np.linspace(0, len(meta.episodes) - 1, LOOKED_AT).round().astype(int))
    column = {name: own for own, name in case.binding.cameras}  # rows have the names of the first dataset's cameras
    looks = []
    for position in (one for one in chosen.tolist() if one not in meta.left_out):
        frame = np.array([int(meta.episodes.length[position]) // 2])
        rows = read_unit(spec, make_unit(meta, spec, position, frame, frame))
        pictures = [rows[column[name]][0].reshape(-1, 3, *case.policy.image_hw)[-1] for _, name in case.binding.cameras]
        looks.append([_small(picture) for picture in pictures])
    return np.array(looks).transpose(1, 0, 2)


def _small(picture_CHW: np.ndarray) -> np.ndarray:
    planes = [cv2.resize(plane, (SIDE, SIDE), interpolation=cv2.INTER_AREA) for plane in picture_CHW]
    return np.stack(planes).reshape(-1).astype(np.float64)


def _colours(looks_KND: np.ndarray) -> np.ndarray:
    """Of each camera, how often each of 16 levels of a channel comes, (cameras, 3 * 16)."""
    of_channel = looks_KND.reshape(*looks_KND.shape[:2], CHANNELS, -1)
    return np.array(
        [
            np.concatenate([np.histogram(one[:, c], 16, (0, 256))[0] / one[:, c].size for c in range(CHANNELS)])
            for one in of_channel
        ]
    )


def best_match(first_KND: np.ndarray, other_KND: np.ndarray) -> tuple[int, ...]:
    """For each camera of the first dataset the one of the other that looks like it; each itself unless another order is
    nearer by far. Mean pictures are compared, so that what moves counts for little, and the shares of colours."""
    means = [looks.mean(axis=1) / 255 for looks in (first_KND, other_KND)]
    colours = [_colours(looks) for looks in (first_KND, other_KND)]
    apart_KK = np.abs(means[0][:, None] - means[1][None]).mean(axis=2)
    apart_KK += np.abs(colours[0][:, None] - colours[1][None]).sum(axis=2) / (2 * CHANNELS)
    same = tuple(range(len(apart_KK)))
    if len(same) > 6:  # too many orders to try
        return same
    cost = {order: sum(apart_KK[place, found] for place, found in enumerate(order)) for order in permutations(same)}
    best = min(cost, key=lambda order: cost[order])
    return best if cost[best] < SWAP_GAIN * cost[same] else same
