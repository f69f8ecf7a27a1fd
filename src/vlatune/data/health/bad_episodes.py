"""Find unusable episodes before a run starts (`on_bad_episode=skip`).

The driver reads every row and packet of the wanted episodes once, file by file, in threads, without
decoding. The result is the same for every worker and restart, so the sample order stays a pure
function. Errors of the store are raised, not attributed to episodes.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from vlatune.data.frames.images import check_image_columns
from vlatune.data.health.row_checks import RECORDED, matched_unit, read_values
from vlatune.data.health.video_health import check_ends, frame_times, why_no_frame
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.meta.episodes import find_shared_frames
from vlatune.data.meta.listing import by_file, check_present
from vlatune.data.meta.meta_info import LEAVE_OUT
from vlatune.data.order.partition import Selection, pick
from vlatune.data.read_spec import CameraSpec, ReadSpec, Unit, frame_place
from vlatune.data.reader import make_unit
from vlatune.storage.parquet import opened

THREADS = 8
"""Number of files read concurrently; the check is I/O-bound."""
SHOWN = 10
NO_FRAMES = np.zeros(0, np.int64)

type Rows = dict[int, tuple[Unit, dict[str, np.ndarray]]]
"""Maps an episode's position to its unit and the times of its rows."""
type Reasons = dict[int, str]
"""Maps an episode's position to its problem."""


@dataclass(frozen=True)
class BadEpisode:
    dataset_index: int
    dataset: str
    episode: int
    """The episode_index."""
    reason: str


def find_bad_episodes(
    metas: Sequence[DatasetMeta],
    specs: Sequence[ReadSpec],
    selection: Selection,
    *,
    on_file: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[BadEpisode, ...]:
    """Return the unreadable selected episodes; `on_file` receives (files done, all files)."""
    jobs = []
    for number, (meta, spec) in enumerate(zip(metas, specs, strict=True)):
        positions = selection.position[selection.dataset == number].tolist()
        videos = [(one, group) for one in _video_cameras(spec) for group in by_file(meta, one.name, positions)]
        jobs.append((meta, spec, by_file(meta, None, positions), videos))
    total, done = sum(len(data) + len(videos) for *_, data, videos in jobs), itertools.count(1)
    bad: list[BadEpisode] = []
    pool = ThreadPoolExecutor(THREADS)
    try:
        for meta, spec, data, videos in jobs:
            rows: Rows = {}
            reasons: Reasons = {}
            for good, found in pool.map(partial(check_data_file, meta, spec), data):
                rows |= good
                reasons |= found
                on_file(next(done), total)
            for found in pool.map(partial(_check_video, meta, spec, rows), *zip(*videos, strict=True)):
                reasons = found | reasons  # keep the first reason
                on_file(next(done), total)
            shared = _find_shared_frames(meta, spec)
            reasons = {one: shared[one] for group in data for one in group if one in shared} | reasons
            bad += [
                BadEpisode(spec.dataset_index, spec.root.url, int(meta.episodes.index[position]), reasons[position])
                for position in sorted(reasons)
            ]
    finally:
        pool.shutdown(cancel_futures=True)  # do not start queued files after an error or Ctrl-C
    return tuple(bad)


def check_data_file(meta: DatasetMeta, spec: ReadSpec, positions: Sequence[int]) -> tuple[Rows, Reasons]:
    """Return the row times of good episodes in one data file, and the problems of bad ones."""
    good: Rows = {}
    bad: Reasons = {}
    images, file = [one.name for one in spec.cameras if one.kind == "image"], meta.data_path(positions[0])
    try:
        if images:  # the images themselves are not decoded
            with opened(spec.root, file) as parquet:
                check_image_columns(parquet, images)
    except ValueError as error:  # applies to the entire file
        text = str(error).removeprefix(f"dataset '{spec.root.url}': ")
        return {}, dict.fromkeys(positions, f"dataset '{spec.root.url}': {file}: {text}")
    for position in sorted(positions, key=lambda at: int(meta.episodes.data_offset[at])):
        unit = make_unit(meta, spec, position, NO_FRAMES, NO_FRAMES)
        try:
            values = read_values(spec, unit)
            good[position] = unit, {name: values[name] for name in ("timestamp", RECORDED)}
        except ValueError as error:
            bad[position] = str(error)
    return good, bad


def _check_video(
    meta: DatasetMeta, spec: ReadSpec, rows: Rows, camera: CameraSpec, positions: Sequence[int]
) -> Reasons:
    """Return the problems of episodes in one mp4 file whose rows are good."""
    good = [position for position in positions if position in rows]
    if not good:
        return {}
    places = {position: _place(meta, spec, camera, position) for position in good}
    first, from_s = places[good[0]], meta.episodes.videos[camera.name].from_s
    file = meta.video_path(good[0], camera.name)
    num_frames = matched_unit(spec, *rows[good[0]]).num_video_frames
    recorded = camera.recorded and replace(camera.recorded, num_frames=num_frames)
    try:
        found_s = frame_times(spec.root, file, recorded, first)
    except ValueError as error:  # its prefix names the first episode
        text = str(error).removeprefix(first)
        return {position: f"{place}{text}" for position, place in places.items()}
    bad: Reasons = {}
    for position, place in places.items():
        wanted_s = from_s[position] + rows[position][1]["timestamp"].astype(float)
        if reason := why_no_frame(found_s, wanted_s, spec.tolerance_s):
            bad[position] = f"{place}: {reason}"
    return bad


def check_first(metas: Sequence[DatasetMeta], specs: Sequence[ReadSpec], selection: Selection) -> None:
    """Quickly reject common errors: missing files, or a first episode that contradicts meta/."""
    for number, (meta, spec) in enumerate(zip(metas, specs, strict=True)):
        positions = selection.position[selection.dataset == number].tolist()
        if not positions:
            continue
        cameras, first = _video_cameras(spec), positions[0]
        check_present(meta, [camera.name for camera in cameras], positions)
        bad = _find_shared_frames(meta, spec) | check_data_file(meta, spec, [first])[1]
        for reason in (bad[position] for position in positions if position in bad):
            raise ValueError(reason)
        for camera in cameras:
            file = meta.video_path(first, camera.name)
            check_ends(spec.root, file, camera.recorded, _place(meta, spec, camera, first))


def _video_cameras(spec: ReadSpec) -> list[CameraSpec]:
    return [camera for camera in spec.cameras if camera.kind == "video"]


def _find_shared_frames(meta: DatasetMeta, spec: ReadSpec) -> Reasons:
    """Return the episodes that share frames of mp4 files; none if each has its own files."""
    if meta.has_own_videos:
        return {}
    found = [find_shared_frames(meta.episodes, camera.name, meta.fps) for camera in _video_cameras(spec)]
    return {position: f"dataset '{spec.root.url}': {text}" for one in reversed(found) for position, text in one.items()}


def _place(meta: DatasetMeta, spec: ReadSpec, camera: CameraSpec, position: int) -> str:
    file = meta.video_path(position, camera.name)
    return frame_place(spec.root, int(meta.episodes.index[position]), camera.name, file)


def leave_out(selection: Selection, metas: Sequence[DatasetMeta], bad: Sequence[BadEpisode]) -> Selection:
    """Return the selection without the bad episodes; raise if none is left."""
    known = {(one.dataset_index, one.episode) for one in bad}
    episodes = [
        (dataset, int(metas[dataset].episodes.index[position]))
        for dataset, position in zip(selection.dataset.tolist(), selection.position.tolist(), strict=True)
    ]
    is_good = np.array([one not in known for one in episodes], dtype=bool)
    if bad and not is_good.any():
        reason = bad[0].reason.removesuffix(f", or {LEAVE_OUT}")
        raise ValueError(f"all {len(selection)} episodes are bad, so there is nothing to read; the first: {reason}")
    return pick(selection, is_good)


def without(metas: Sequence[DatasetMeta], bad: Sequence[BadEpisode]) -> tuple[DatasetMeta, ...]:
    """Return the datasets with their bad episodes marked as left out; an episode's index is its position."""
    return tuple(
        replace(meta, left_out=frozenset(one.episode for one in bad if one.dataset_index == number))
        for number, meta in enumerate(metas)
    )


def skip_line(bad: Sequence[BadEpisode], num_selected: int) -> str:
    """Return a summary for the log."""
    shown = ", ".join(str(one.episode) for one in bad[:SHOWN])
    more = f", and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return f"{len(bad)} of {num_selected} episodes are bad and left out: {shown}{more}; the first: {bad[0].reason}"
