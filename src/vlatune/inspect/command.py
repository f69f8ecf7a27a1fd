"""The command that trains on what was inspected: roots, the map of names that they need, the statistics to take. Pure.

Names of cameras that differ between datasets are paired in their order, which is a guess that the text names.
"""

import json
import shlex
from collections.abc import Mapping, Sequence

from vlatune.batch import ACTION, STATE
from vlatune.dataset.meta.feature_map import RESERVED, as_flag, camera_name, likely_name
from vlatune.errors import did_you_mean
from vlatune.inspect.facts import FeatureFacts
from vlatune.inspect.inspection import Inspection
from vlatune.inspect.problems import COMPUTE, RENAME

type Names = dict[str, str]


def check_names(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> None:
    """Refuse a name that none of the datasets has."""
    known = {feature.name for one in found for feature in one.features}
    for name in rename_map:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
            raise ValueError(f"--rename_map: no dataset has a feature '{name}'{hint}")


def command_text(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> str:
    """The command in one line, to be copied, and what in it is a guess; empty where none would train."""
    command = train_command(found, rename_map)
    if command is None:
        return ""
    lines = ["a small model trains on it, on a CPU too, with:", f"  {command}"]
    for names, one in zip(_all_maps(found, rename_map) or [], found, strict=True):
        lines += _guesses(names, one, found[0], rename_map)
    return "\n".join(lines)


def train_command(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> str | None:
    """None where something other than names is in the way."""
    maps = _all_maps(found, rename_map)
    in_the_way = [p for one in found for p in one.problems if p.severity == "error" and p.flag != RENAME]
    if maps is None or in_the_way or any(one.episodes is None for one in found):
        return None
    words = ["vlatune", "train", "--recipe=tiny", *(f"--dataset.root={shlex.quote(one.dataset)}" for one in found)]
    words += _map_flags(found, maps)
    if len(found) == 1 and any(
        problem.flag == COMPUTE for problem in found[0].problems
    ):  # of several datasets they are computed anyway
        words.append(COMPUTE)
    text = " ".join(words)
    return text if text.isprintable() else None


def _all_maps(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> list[Names] | None:
    """For each dataset the names that it needs; None where an action, a state or a camera is nowhere to be seen."""
    maps: list[Names] = []
    for one in found:
        names = _own_map(one.features, rename_map)
        if names is None:
            return None
        maps.append(names)
    targets = _cameras(found[0], maps[0]).values()
    for one, names in zip(found[1:], maps[1:], strict=True):
        mine = _cameras(one, names)
        unmatched = [own for own, name in mine.items() if name not in targets and own not in rename_map]
        free = [name for name in targets if name not in mine.values()]
        names |= dict(zip(unmatched, free, strict=False))
    return maps


def _own_map(features: Sequence[FeatureFacts], rename_map: Mapping[str, str]) -> Names | None:
    names = {one.name: rename_map[one.name] for one in features if one.name in rename_map}
    taken = {names.get(one.name, one.name) for one in features}
    vectors = [one.name for one in features if not one.is_camera and one.name not in RESERVED and one.name not in names]
    for key in (ACTION, STATE):
        if key not in taken:
            likely = likely_name(key, vectors)
            if likely is None:
                return None
            names[likely] = key
    for one in features:
        wanted = camera_name(one.name)
        if one.is_camera and not one.is_depth and one.name not in names and wanted not in taken:
            names[one.name] = wanted
            taken.add(wanted)
    return names if any(one.is_camera and not one.is_depth for one in features) else None


def _cameras(one: Inspection, names: Names) -> Names:
    """Own name -> delivered name of the colour cameras."""
    return {f.name: names.get(f.name, f.name) for f in one.features if f.is_camera and not f.is_depth}


def _map_flags(found: Sequence[Inspection], maps: Sequence[Names]) -> list[str]:
    """One map for all where the datasets' names do not contradict each other, else one for each."""
    if not any(maps):
        return []
    common = {own: name for names in maps for own, name in names.items()}
    features = [[feature.name for feature in one.features] for one in found]
    if all(
        {own: common[own] for own in each if own in common} == names for each, names in zip(features, maps, strict=True)
    ):
        return [as_flag(common)]
    return [as_flag(names, "--dataset.rename_map") for names in maps]


def _guesses(names: Names, one: Inspection, first: Inspection, rename_map: Mapping[str, str]) -> list[str]:
    if one is first:
        return []
    return [
        f"  a guess: {json.dumps(own)} of {shlex.quote(one.dataset)} shows what {json.dumps(name)} of "
        f"{shlex.quote(first.dataset)} does; correct the map if not"
        for own, name in _cameras(one, names).items()
        if own not in rename_map and name != camera_name(own)
    ]
