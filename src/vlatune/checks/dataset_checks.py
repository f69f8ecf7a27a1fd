"""Checks of a LeRobot dataset, for `vlatune inspect` and `vlatune doctor`.

`read_files` lists the folders once and reads the headers of one mp4 file per camera (or of all).
`check_dataset` checks meta/, the listed files, the statistics against the rows, and the episodes with
the functions of `vlatune train`: every row and packet of a small local dataset, else of a few episodes. Nothing is decoded, so that large datasets take seconds.

A failed finding prevents training or makes it learn something else than was recorded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any

import av.error
import numpy as np

from vlatune.batch import ACTION, STATE
from vlatune.data.features import (
    ALIASES,
    SELECT_DIMS,
    as_flag,
    camera_name,
    camera_spec,
    likely_name,
    vector_spec,
)
from vlatune.data.frames.recorded import DECODERS, camera_fps, ffmpeg_message, is_out_of_reach, is_rate, open_container
from vlatune.data.frames.watchdog import within_time
from vlatune.data.health.bad_episodes import find_bad_episodes
from vlatune.data.health.row_checks import INDEX_KINDS
from vlatune.data.health.stats_check import compare_with_rows, dim_text, doubts, is_flat
from vlatune.data.health.timestamps import is_small, spread, with_timestamps
from vlatune.data.health.video_health import is_cut_off
from vlatune.data.meta.dataset_meta import DatasetMeta, Feature
from vlatune.data.meta.listing import folder_remedy, list_files, one_per_file, top_folder
from vlatune.data.order.partition import pick, select_episodes
from vlatune.data.read_spec import ReadSpec
from vlatune.data.tables import read_rows
from vlatune.findings import Finding, Level, worst
from vlatune.registry import DEFAULT_TYPE, get_policy_info, policy_types
from vlatune.storage.files import parse_json
from vlatune.storage.root import Root

INFO = "meta/info.json"
MAX_EXAMPLES = 10
THREADS = 8
"""Number of files opened concurrently; the checks are I/O-bound."""
TIME_TOLERANCE_S = 1e-4
"""Default of the reader."""
MAX_IMAGE_STAT = 2.0
"""Larger statistics are of images in 0..255 instead of 0..1."""
RATE_SHARE = 0.01
"""Relative tolerance of frame rates."""
COMPUTE, SKIP = "--dataset.stats=computed", "--dataset.on_bad_episode=skip"
FRAME_INDEX = "--dataset.timestamps=frame_index"
POLICY = get_policy_info(DEFAULT_TYPE)
"""Policy whose base models a dataset is compared with."""
SUFFIXES = {"data_path": ".parquet", "video_path": ".mp4"}
FETCH = (
    "fetch them again (a file of some 130 bytes is a Git LFS pointer: run `git lfs pull`), or leave the episodes out"
)
ENCODE = "fetch or encode the files again, or leave the episodes out"


@dataclass(frozen=True)
class VideoHeader:
    file: str
    height: int = 0
    width: int = 0
    codec: str = ""
    pixel_format: str = ""
    fps: float = 0.0
    num_frames: int = 0
    """0 if the container does not state it."""
    begin_s: float = 0.0
    """Time of the first frame."""
    error: str = ""
    """Why the file could not be opened; other fields are unset then."""


@dataclass(frozen=True)
class DatasetFiles:
    """Files in the folders, and files that the metadata refers to."""

    folders: tuple[str, ...]
    present: Mapping[str, Mapping[str, int]]
    """Maps data, videos and meta to file sizes by name."""
    data: tuple[str, ...]
    """Required data files."""
    videos: Mapping[str, tuple[str, ...]]
    """Maps cameras to their required mp4 files; empty for images in parquet."""
    headers: Mapping[str, list[VideoHeader]]
    """Maps cameras to the headers that were read."""

    def present_videos(self, camera: str) -> dict[str, int]:
        present = self.present["videos"]
        return {name: present[name] for name in self.videos[camera] if name in present}


def read_files(
    meta: DatasetMeta, *, every: bool = False, on_file: Callable[[int, int], None] = lambda done, total: None
) -> DatasetFiles:
    """List the files and read the header of one mp4 file per camera, or of `every` one."""
    tops = {"data": top_folder(meta.templates["data_path"]), "videos": top_folder(meta.templates["video_path"])}
    found = DatasetFiles(
        folders=tuple(meta.root.glob("*")),
        present={name: list_files(meta.root, folder) for name, folder in {**tops, "meta": "meta"}.items()},
        data=tuple(meta.data_path(position) for position in one_per_file(meta)[0]),
        videos={
            camera: tuple(meta.video_path(position, camera) for position in one_per_file(meta, camera)[0])
            if camera in meta.episodes.videos
            else ()
            for camera in meta.cameras
        },
        headers={camera: [] for camera in meta.cameras},
    )
    wanted = [(camera, name) for camera in found.videos for name in list(found.present_videos(camera))]
    if not every:
        wanted = list({camera: (camera, name) for camera, name in reversed(wanted)}.values())[::-1]
    with ThreadPoolExecutor(THREADS) as pool:
        headers = pool.map(lambda one: read_header(meta.root, one[1]), wanted)
        for number, ((camera, _), header) in enumerate(zip(wanted, headers, strict=True)):
            found.headers[camera].append(header)
            on_file(number + 1, len(wanted))
    return found


def read_header(root: Root, file: str) -> VideoHeader:
    """Read the header of an mp4 file; errors of the store are raised."""
    try:
        with root.open_for_ffmpeg(file) as source:
            return within_time(lambda: _parse_header(source, file), file)
    except FileNotFoundError:
        return VideoHeader(file, error="it is missing")
    except ValueError as error:  # rejected before FFmpeg opened it, or by its checksum
        return VideoHeader(file, error=str(error).removeprefix(f"dataset '{root.url}': ").removeprefix(f"{file}: "))
    except av.error.FFmpegError as error:
        if is_out_of_reach(error):
            raise
        return VideoHeader(file, error=" ".join(ffmpeg_message(error).split()))


def _parse_header(source: str | IO[bytes], file: str) -> VideoHeader:
    with open_container(source, file) as container:
        if not container.streams.video:
            return VideoHeader(file, error="it has no video stream")
        stream = container.streams.video[0]
        context: Any = stream.codec_context
        if context is None or not stream.time_base:
            return VideoHeader(file, error="FFmpeg does not decode its video stream")
        if context.codec.name not in DECODERS:
            return VideoHeader(file, error=f"its codec '{context.codec.name}' is not supported")
        if is_cut_off(container, stream):
            return VideoHeader(file, error="it is cut off: the last frames are missing")
        return VideoHeader(
            file=file,
            height=context.height,
            width=context.width,
            codec=context.codec.canonical_name,
            pixel_format=context.pix_fmt or "",
            fps=float(stream.average_rate or 0.0),
            num_frames=stream.frames,
            begin_s=float((stream.start_time or 0) * stream.time_base),
        )


def check_dataset(
    meta: DatasetMeta, files: DatasetFiles, *, every: bool = False, episodes: bool = True
) -> list[Finding]:
    """Return the findings, failures first.

    `every` reads all rows and packets. `episodes=False` leaves out the check of rows and
    packets, for a caller that checks the selected episodes.
    """
    selection = select_episodes([meta], None)
    [spec], doubtful = with_timestamps([meta], [trained_spec(meta)], selection, "auto")
    incomplete = _incomplete_episodes(meta, spec, files)
    of_meta = [*_check_totals(meta), *_check_names(meta), *_check_stats(meta)]
    readable = [*_check_files(meta, spec, files, can_skip=len(incomplete) < len(selection))]
    for camera, headers in files.headers.items():
        found = _check_headers(meta, camera, headers)
        is_used = any(one.name == camera for one in spec.cameras)
        readable += found if is_used else [replace(one, level="warn") for one in found]
    for text in map(str, doubtful):
        text = text.removeprefix(f"dataset '{meta.root.url}': ").removesuffix(f" ({FRAME_INDEX})")
        readable.append(Finding("warn", "timestamps", text, remedy="confirm it", flags=(FRAME_INDEX,)))
    readable += [*_check_rate(meta, files), *_check_rows(meta, every=every)]
    usable = len(selection) - len(incomplete)
    if episodes:
        complete = pick(selection, ~np.isin(selection.position, list(incomplete)))
        is_sampled = not (every or is_small([meta], selection))
        checked = pick(complete, np.isin(complete.position, spread(complete.position))) if is_sampled else complete
        bad = find_bad_episodes([meta], [spec], checked)
        usable = len(checked) - len(bad)
        if bad and worst(readable) != "fail":
            readable.append(
                Finding(
                    "fail",
                    "episodes",
                    f"{'all' if not usable else f'{len(bad)} of'} {len(checked)} checked episodes cannot be read",
                    expected="rows and frames that `vlatune train` reads",
                    remedy="fetch or record them again" + (", or leave them out" if usable else ""),
                    flags=(SKIP,),
                    examples=tuple(one.reason.removeprefix(f"dataset '{one.dataset}': ") for one in bad[:MAX_EXAMPLES]),
                    count=len(bad),
                )
            )
    if not usable:
        readable = [replace(one, flags=()) if one.flags == (SKIP,) else one for one in readable]
    return sorted([*of_meta, *readable], key=lambda one: one.level)  # "fail" sorts before "warn"


def trained_spec(meta: DatasetMeta) -> ReadSpec:
    """Return what a policy would read: colour cameras, state and action."""
    cameras = [camera_spec(meta, name, None) for name in meta.cameras if not meta.features[name].is_depth]
    vectors = [vector_spec(meta, name, is_float32=True) for name in _state_and_action(meta)]
    return ReadSpec(meta.root, 0, TIME_TOLERANCE_S, tuple(cameras), tuple(vectors), meta.tasks)


def _state_and_action(meta: DatasetMeta) -> list[str]:
    """Return the dataset's own names of the state and action, or of likely candidates."""
    vectors = [name for name, feature in meta.features.items() if is_normalised(name, feature)]
    names = [meta.own(key) if meta.own(key) in vectors else likely_name(key, vectors) for key in (STATE, ACTION)]
    return [name for name in names if name is not None]


def is_normalised(name: str, feature: Feature) -> bool:
    return name not in INDEX_KINDS and feature.dtype.startswith(("float", "int", "uint"))


def _list(level: Level, check: str, text: str, examples: Sequence[str], **fields: Any) -> list[Finding]:
    """Return one finding for all examples, or none."""
    if not examples:
        return []
    return [Finding(level, check, text, examples=tuple(examples[:MAX_EXAMPLES]), count=len(examples), **fields)]


def _check_totals(meta: DatasetMeta) -> Iterator[Finding]:
    info = parse_json(meta.root.read_bytes(INFO), INFO)
    for name, number in {"total_episodes": len(meta.episodes), "total_frames": meta.num_frames}.items():
        if info.get(name, number) != number:
            text, expected = f"{name} is {info[name]}", f"{number}, as in meta/episodes"
            remedy = f"set {name} to {number} if nothing is missing, else fetch the dataset again"
            yield Finding("fail", "meta", text, place=INFO, expected=expected, remedy=remedy)


def _check_names(meta: DatasetMeta) -> Iterator[Finding]:
    """Check names, widths and depth cameras, which depend on the policy and its flags."""
    features = {meta.names.get(name, name): feature for name, feature in meta.features.items()}
    cameras = [name for name, feature in features.items() if feature.is_camera]
    listed = ", ".join(name for name in features if name not in INDEX_KINDS) or "no features"
    for key in ALIASES:
        if key in features:
            continue
        alias = likely_name(key, [name for name in features if name not in cameras])
        level: Level = "fail" if alias or key == ACTION else "warn"  # some policies need no state
        text = f"the {key} is named '{alias}'" if alias else f"there is no feature '{key}' (there are {listed})"
        flags = (f'--rename_map={{"{alias}": "{key}"}}',) if alias else ()
        remedy = "rename it" if alias else "name the feature that holds it with --rename_map, or record it"
        yield Finding(level, "names", text, place=INFO, expected=f"'{key}'", remedy=remedy, flags=flags)
    for name in cameras:
        if camera_name(name) not in features and not features[name].is_depth:
            text, expected = f"the camera is named '{name}'", f"'{camera_name(name)}'"
            flags = (f'--rename_map={{"{name}": "{camera_name(name)}"}}',)
            yield Finding("warn", "names", text, place=INFO, expected=expected, remedy="rename it", flags=flags)
    if not cameras:
        yield Finding("warn", "names", f"there is no camera (there are {listed})", place=INFO, remedy="record one")
    most = POLICY.max_dims
    wide = {key: features[key].shape[0] for key in (ACTION, STATE) if key in features and features[key].shape}
    if (widest := max(wide.values(), default=0)) > most:
        infos = [get_policy_info(name) for name in policy_types()]
        others = ", ".join(f"--policy.type={info.type}" for info in infos if info.max_dims >= widest)
        yield Finding(
            "warn",
            "dims",
            " and ".join(f"'{key}' has {dims} dims" for key, dims in wide.items() if dims > most),
            place=INFO,
            expected=f"at most {most} for {POLICY.title}'s base models",
            remedy=f"train another policy ({others}), or use some of the dims, such as the first: {select_first(wide)}",
        )
    yield from _list(
        "warn",
        "depth",
        "depth cameras",
        [name for name in cameras if features[name].is_depth],
        place=INFO,
        expected="colour cameras",
        remedy="leave them out of --rename_map and of `cameras`; depth would be decoded as colour",
    )


def select_first(widths: Mapping[str, int]) -> str:
    """Return the flag that selects as many dims of too wide features as the default policy takes."""
    most = POLICY.max_dims
    return as_flag({key: [f"0:{most}"] for key, dims in widths.items() if dims > most}, SELECT_DIMS)


def _check_stats(meta: DatasetMeta) -> Iterator[Finding]:
    """Check the statistics of features that policies normalise, without reading rows."""
    place = "meta/stats.json" if meta.version == "v3.0" else "meta/episodes_stats.jsonl"
    names = [name for name, feature in meta.features.items() if is_normalised(name, feature)]
    stats = {name: meta.stats.get(name, {}) for name in names}
    wrong_width, not_finite = [], []
    for name, of in stats.items():
        feature = meta.features[name]
        width = int(np.prod(feature.shape))
        for which, values in of.items():
            if which != "count" and values.size != width:
                wrong_width.append(f"{name}: {which} has {values.size} values, not {width}")
        bad = {int(dim) for values in of.values() for dim in np.flatnonzero(~np.isfinite(values))}
        not_finite += [f"{name}: {dim_text(dim, feature.names, width)}" for dim in sorted(bad)]
    computed = "nothing for vlatune, which computes them at the start; for LeRobot, "
    computed += (
        "convert to v3.0 and " if meta.version == "v2.1" else ""
    ) + "run lerobot.scripts.augment_dataset_quantile_stats"
    without = [name for name in names if not stats[name]]
    no_quantiles = [name for name in names if stats[name] and not {"q01", "q99"} <= stats[name].keys()]
    of_images = [name for name in meta.cameras if is_stats_of_255(meta.stats.get(name, {}))]
    recompute = {"remedy": "compute them from the rows", "flags": (COMPUTE,)}
    divide = "divide them by 255 if a policy normalises images with them"
    table: list[tuple[Level, str, str, list[str], dict[str, Any]]] = [
        ("warn", "quantiles", "features without statistics", without, {"remedy": computed}),
        ("warn", "quantiles", "features without q01 and q99", no_quantiles, {"remedy": computed}),
        ("fail", "statistics", "statistics of another width than the feature", wrong_width, recompute),
        ("fail", "statistics", "statistics that are not finite", not_finite, recompute),
        ("warn", "statistics", "statistics of images in 0..255", of_images, {"expected": "0..1", "remedy": divide}),
    ]
    for level, check, text, examples, fields in table:
        yield from _list(level, check, text, examples, place=place, **fields)


def is_stats_of_255(stats: Mapping[str, np.ndarray]) -> bool:
    return any(float(np.max(one)) > MAX_IMAGE_STAT for name, one in stats.items() if name != "count" and one.size)


def _incomplete_episodes(meta: DatasetMeta, spec: ReadSpec, files: DatasetFiles) -> set[int]:
    """Return the positions of episodes with missing files."""
    found: set[int] = set()
    for camera in (None, *(camera.name for camera in spec.cameras if camera.kind == "video")):
        positions, group = one_per_file(meta, camera)
        names = [meta.data_path(at) if camera is None else meta.video_path(at, camera) for at in positions]
        present = files.present["data" if camera is None else "videos"]
        is_missing = np.array([name not in present for name in names], dtype=bool)
        found.update(np.flatnonzero(is_missing[group]).tolist())
    return found


def _check_files(meta: DatasetMeta, spec: ReadSpec, files: DatasetFiles, *, can_skip: bool) -> Iterator[Finding]:
    """Report missing and stray files; `can_skip` is False if every episode lacks a file."""
    used = {camera.name for camera in spec.cameras}
    videos = [name for camera, names in files.videos.items() if camera in used for name in names]
    named = {*files.data, *(name for names in files.videos.values() for name in names)}
    flags, none_complete = ((SKIP,), "") if can_skip else ((), ", so no episode is complete")
    for which, kind, wanted in (("data_path", "data", [*files.data]), ("video_path", "videos", videos)):
        present, suffix, folder = files.present[kind], SUFFIXES[which], top_folder(meta.templates[which])
        missing = [name for name in wanted if name not in present]
        stray = sorted(name for name in present if name.endswith(suffix) and name not in named)
        number = "all" if len(missing) == len(wanted) else f"{len(missing):,} of"
        remedy = folder_remedy(folder, files.folders)
        if not remedy and stray:
            remedy = f"there are files such as {stray[0]}: move them, or correct {which} in {INFO}"
        remedy = remedy or "fetch the dataset again" + (", or leave the episodes out" if can_skip else "")
        place = f"{folder or '.'}/"
        text, expected = f"{number} {len(wanted):,} {suffix} files are missing{none_complete}", meta.templates[which]
        yield from _list("fail", "files", text, missing, place=place, expected=expected, remedy=remedy, flags=flags)
        remedy = "remove them, or fetch meta/ again if it is older"
        yield from _list("warn", "files", f"{suffix} files without an episode", stray, place=place, remedy=remedy)


def _check_headers(meta: DatasetMeta, camera: str, headers: Sequence[VideoHeader]) -> list[Finding]:
    """Compare headers with info.json; the check of episodes counts frames."""
    if not headers:
        return []
    feature, fps = meta.features[camera], camera_fps(meta, camera)
    height, width = feature.height_width
    good = [one for one in headers if not one.error]
    other_size = [f"{one.file}: {one.height}x{one.width}" for one in good if (one.height, one.width) != (height, width)]
    other_rate = [f"{one.file}: {one.fps:g} fps" for one in good if not is_rate(one.fps, fps, one.num_frames)]
    positions, group = one_per_file(meta, camera)
    first_s = np.full(len(positions), np.inf)
    np.minimum.at(first_s, group, np.nan_to_num(meta.episodes.videos[camera].from_s))
    first_row_s = dict(zip((meta.video_path(at, camera) for at in positions), first_s.tolist(), strict=True))
    late = [  # all frames of the file may be late then, also of episodes with a frame for every row
        f"{one.file}: {one.begin_s:.4f} s, not {first_row_s[one.file]:.4f} s"
        for one in good
        if one.begin_s > first_row_s[one.file] + 0.5 / fps
    ]
    unreadable = [f"{one.file}: {one.error}" for one in headers if one.error]
    resize = f"correct the feature's shape in {INFO}, or encode the files again"
    retime = (
        f"set fps and video.fps in {INFO} if the rows' timestamps agree with the files; else encode the files again"
    )
    table = [
        ("files that cannot be opened as video", unreadable, "mp4 files", FETCH),
        (f"files with another image size than {INFO}", other_size, f"{height}x{width}", resize),
        (f"files with another frame rate than {INFO}", other_rate, f"{fps:g} fps", retime),
        ("files that begin after the first row", late, "a frame at the time of every row", ENCODE),
    ]
    found, place = [], f"camera '{camera}'"
    for text, examples, expected, remedy in table:
        flags = (SKIP,) if remedy in (FETCH, ENCODE) else ()
        found += _list("fail", "videos", text, examples, place=place, expected=expected, remedy=remedy, flags=flags)
    return found


def _check_rate(meta: DatasetMeta, files: DatasetFiles) -> Iterator[Finding]:
    """Compare fps with the first episode's timestamps, if the mp4 files agree with these."""
    begin, end = int(meta.episodes.data_offset[0]), int(meta.episodes.data_offset[0] + meta.episodes.length[0])
    file, found = meta.data_path(0), [one.fps for of in files.headers.values() for one in of if not one.error]
    if not found or file not in files.present["data"]:
        return
    try:
        rows = read_rows(meta.root, file, ["timestamp"], begin, end, optional=["timestamp"])
        times_s = rows.columns["timestamp"].astype(np.float64)
    except (KeyError, ValueError):  # reported by the checks of data files and episodes
        return
    apart_s = np.diff(times_s)
    apart_s = apart_s[np.isfinite(apart_s) & (apart_s > 0)]
    rate = 1 / float(np.median(apart_s)) if len(apart_s) else meta.fps
    if abs(rate - meta.fps) > RATE_SHARE * meta.fps and all(abs(one - rate) <= RATE_SHARE * rate for one in found):
        text = f"fps is {meta.fps:g}, but rows and mp4 files have {found[0]:g} fps"
        remedy = f"set fps to {found[0]:g} in {INFO}; action chunks would have a wrong duration"
        yield Finding("fail", "fps", text, place=INFO, expected=f"{found[0]:g}", remedy=remedy)


def _check_rows(meta: DatasetMeta, *, every: bool) -> Iterator[Finding]:
    """Compare state and action with their statistics."""
    limits = {"max_files": len(meta.episodes), "max_rows": meta.num_frames} if every else {}
    for own in _state_and_action(meta):
        try:
            yield from _check_feature_rows(meta, own, f"data files, feature '{own}'", limits)
        except ValueError:  # unreadable rows, which the check of episodes reports
            return


def _check_feature_rows(meta: DatasetMeta, own: str, place: str, limits: Mapping[str, int]) -> Iterator[Finding]:
    feature, stats = meta.features[own], meta.stats.get(own, {})
    seen = compare_with_rows(meta, own, stats, **limits)
    if seen is None:
        return
    width = len(seen.is_finite_D)
    rows = f"in {'all' if seen.is_all else 'the checked'} {seen.num_rows:,} rows"
    bad = [dim_text(int(dim), feature.names, width) for dim in np.flatnonzero(~seen.is_finite_D)]
    yield from _list(
        "fail",
        "data",
        f"values that are not finite, {rows}",
        [*seen.not_finite[:5], *bad] if bad else [],
        place=place,
        expected="finite numbers",
        remedy="record or convert these episodes again, or leave them out",
        flags=(SKIP,),
    )
    constant_D = (seen.stats["min"] == seen.stats["max"]) & seen.is_finite_D
    has_range = {"q01", "q99"} <= stats.keys() and stats["q01"].shape == stats["q99"].shape == constant_D.shape
    flat_D = is_flat(stats["q01"], stats["q99"]) & ~constant_D if has_range else np.zeros(width, bool)
    constant, flat = (
        [dim_text(int(dim), feature.names, width) for dim in np.flatnonzero(is_wrong_D)]
        for is_wrong_D in (constant_D, flat_D)
    )
    of, compute = f"feature '{own}'", {"remedy": "compute them from the rows", "flags": (COMPUTE,)}
    text, remedy = f"dims that never change, {rows}", "nothing if the joint was not used"
    yield from _list("warn", "statistics", text, constant, place=of, remedy=remedy)
    text = f"dims that vary {rows}, although their q01 is not below q99"
    yield from _list("fail", "statistics", text, flat, place=of, **compute)
    for doubt in doubts(stats, seen, feature.names):
        text, expected = f"{doubt.text}, {rows}", "statistics of the rows"
        yield from _list("warn", "statistics", text, doubt.examples, place=of, expected=expected, **compute)
