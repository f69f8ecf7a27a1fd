"""The datasets of a run, by themselves: files, rate, episodes, statistics, samples.

What `vlatune inspect` finds in files is taken from it; what a run would refuse is refused by the same functions as there.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlatune.config_checks import validate
from vlatune.dataset.health.bad_episodes import check_first, find_bad_episodes, leave_out, without
from vlatune.dataset.health.row_checks import check_kinds
from vlatune.dataset.health.stats_check import RowsSeen, check_stats, doubts, look_at_rows
from vlatune.dataset.meta.dataset_meta import DatasetMeta, check_complete, load_meta
from vlatune.dataset.meta.stats import feature_stats, has_stats
from vlatune.dataset.order.partition import select_episodes
from vlatune.dataset.storage.remote_fs import parse_storage_options
from vlatune.dataset.storage.root import Root
from vlatune.dataset.storage.tables import read_columns
from vlatune.doctor.findings import MAX_SHOWN, Case, Finding, edit_json_command, refused
from vlatune.files import parse_json
from vlatune.inspect.inspection import inspect_dataset
from vlatune.inspect.problems import Problem
from vlatune.policies.binding import bind, join_bindings
from vlatune.policies.normalisation import stats_needed
from vlatune.report.formatting import plural
from vlatune.run_setup import dataset_roots, make_setup, read_specs

INFO = "meta/info.json"
COMPUTED, SKIP = "--dataset.stats=computed", "--dataset.on_bad_episode=skip"
WHOLE_FRAMES = 200_000
"""Local datasets of up to so many frames are looked at row by row and packet by packet: some ten seconds."""
RATE_SHARE = 0.01
MANY_SKIPPED = 0.2


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
