"""The bad episodes of a run (`--dataset.on_bad_episode=skip`): found once, kept in the run folder, the same ever after.

A run that goes on takes its list from the folder, even when the data was mended meanwhile: other episodes would be
another order of samples.
"""

from collections.abc import Sequence
from pathlib import Path

from vlatune.config import RunConfig
from vlatune.dataset.health import BadEpisode, find_bad_episodes, print_progress
from vlatune.dataset.meta import DatasetMeta
from vlatune.dataset.reader import ReadSpec
from vlatune.dataset.select import Selection
from vlatune.files import read_json
from vlatune.report.run_folder import CONFIG_FILE
from vlatune.report.sinks import write_json

SKIPPED_FILE = "skipped_episodes.json"


def bad_episodes(
    config: RunConfig, metas: Sequence[DatasetMeta], specs: Sequence[ReadSpec], selection: Selection
) -> tuple[BadEpisode, ...]:
    """Those of the run folder where there are some, else what a check of the whole dataset finds."""
    if (config.run_dir / CONFIG_FILE).exists() and (config.run_dir / SKIPPED_FILE).exists():
        return read_skipped(config.run_dir)
    return find_bad_episodes(metas, specs, selection, on_file=print_progress)


def keep_skipped(run_dir: Path, bad: Sequence[BadEpisode]) -> None:
    """Write the list down, once."""
    if not (run_dir / SKIPPED_FILE).exists():
        write_json(run_dir / SKIPPED_FILE, {"skipped_episodes": [one.to_json() for one in bad]})


def read_skipped(run_dir: Path) -> tuple[BadEpisode, ...]:
    file = run_dir / SKIPPED_FILE
    try:
        listed = read_json(run_dir, SKIPPED_FILE)["skipped_episodes"]
        return tuple(
            BadEpisode(int(one["dataset_index"]), str(one["dataset"]), int(one["episode"]), str(one["reason"]))
            for one in listed
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{file}' is not readable ({error}), so the run's episodes are not known; restore it, or begin a new run"
        ) from error
