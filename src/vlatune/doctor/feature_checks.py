"""The features of a run's datasets against the policy's: names, dims, cameras; and the same camera in several datasets.

What a run would refuse is refused by the same functions as there.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

import cv2
import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.dataset.features import RESERVED, likely_name, with_names
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.reader import make_unit, read_unit
from vlatune.doctor.findings import MAX_SHOWN, Case, Finding, map_flag
from vlatune.policies.binding import bind
from vlatune.policies.registry import all_recipes, get_policy
from vlatune.run_setup import join_roots

CLOSE_NAME = 0.6
"""Likeness (difflib) from which a name is taken to be misspelt."""


LOOKED_AT = 24
"""Frames of a root whose cameras are compared with another root's."""


SIDE, CHANNELS = 12, 3


SWAP_GAIN = 0.5
"""How much nearer the cameras of two datasets must be to each other, crosswise, before they are called swapped."""


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
        join_roots(case.config, case.adapter, wide, case.metas, bound)  # refuses what the map does not mend
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
    joint = join_roots(case.config, case.adapter, wide, case.metas, bound)
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
