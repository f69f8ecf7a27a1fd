"""Statistics for normalisation: the dataset's own, or computed from its parquet files.

The dataset's own statistics are used unchanged, so that they equal LeRobot's. They are computed if
they are missing (v2.1 has no quantiles), if several datasets are trained together (quantiles cannot
be merged), and on request (`--dataset.stats=computed`).

Computed statistics are exact: quantiles equal numpy's over all rows as float32, the training dtype,
and rows of all datasets have equal weight.

Actions relative to the state have separate statistics (`relative_action_stats`), which LeRobot's
`recompute_stats(relative_action=True)` writes in place of the absolute ones.
"""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from vlatune.batch import ACTION, STATE
from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.tables import BATCH_ROWS, read_rows, to_numpy
from vlatune.storage.parquet import opened

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
CHANNELS = 3
REMEDY = "fetch the file again, or correct the feature in meta/info.json"
MAX_RELATIVE_ROWS = 1 << 21
"""Maximum number of actions in relative statistics; beyond it, chunks are subsampled evenly."""


def feature_stats(
    metas: Sequence[DatasetMeta], key: str, names: Sequence[str], *, computed: bool = False
) -> dict[str, np.ndarray]:
    """Return the named statistics (q01, q99, mean, ...) of a feature over all datasets."""
    if not computed and has_stats(metas, key, names):
        own = metas[0].stats[metas[0].own(key)]
        return {name: own[name] for name in names}
    exact = measure(metas, key)
    return {name: exact[name] for name in names}


def relative_action_stats(
    metas: Sequence[DatasetMeta],
    names: Sequence[str],
    *,
    offsets: Sequence[tuple[int, ...]],
    is_relative: Sequence[bool],
    computed: bool = False,
) -> dict[str, np.ndarray]:
    """Return statistics of actions minus the state at the start of their chunk, in relative dims.

    `offsets` holds, for each dataset, the frame offsets of a chunk's actions. Like LeRobot's
    `compute_relative_action_stats`, all chunks within one episode count. The dataset does not state
    whether its own statistics are relative: they are used if they are closer to the relative than
    to the absolute ones. LeRobot only writes them for consecutive frames, so other offsets are
    always computed.
    """

    exact = measure_rows(_relative_parts(metas, offsets, np.array(is_relative, np.float32)))
    is_neighbouring = all(one == tuple(range(len(one))) for one in offsets)
    if not computed and is_neighbouring and has_stats(metas, ACTION, names):
        own, plain = metas[0].stats[metas[0].own(ACTION)], measure(metas, ACTION)
        is_whole = all(own[name].shape == exact[name].shape for name in names)
        if is_whole and _distance(own, exact, names, is_relative) < _distance(own, plain, names, is_relative):
            return {name: own[name] for name in names}
    return {name: exact[name] for name in names}


def _distance(
    stats: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], names: Sequence[str], dims: Sequence[bool]
) -> float:
    spread_D = np.maximum(other["max"] - other["min"], 1e-12)
    return float(sum(np.abs((stats[name] - other[name]) / spread_D)[list(dims)].sum() for name in names))


def _relative_parts(
    metas: Sequence[DatasetMeta], offsets: Sequence[tuple[int, ...]], mask_A: np.ndarray
) -> Iterator[np.ndarray]:
    """Yield relative actions, (n, A), of complete chunks, or of the longest possible ones."""
    readable = [
        (meta, np.array(steps), one)
        for meta, steps in zip(metas, offsets, strict=True)
        for one in range(len(meta.episodes))
        if one not in meta.left_out
    ]
    lengths = [int(meta.episodes.length[position]) for meta, _, position in readable]
    size = max(int(np.searchsorted(steps, length)) for (_, steps, _), length in zip(readable, lengths, strict=True))
    counts = [max(0, length - int(steps[size - 1])) for (_, steps, _), length in zip(readable, lengths, strict=True)]
    every = -(-sum(counts) * size // MAX_RELATIVE_ROWS)
    begun = 0
    for (meta, steps, position), num_starts in zip(readable, counts, strict=True):
        starts = np.arange(-begun % every, num_starts, every)
        begun += num_starts
        if len(starts):
            state_NS, action_NA = (
                read_episode(meta, meta.own(key), position).astype(np.float32) for key in (STATE, ACTION)
            )
            chunks_NTA = action_NA[starts[:, None] + steps[:size]]
            yield (chunks_NTA - (state_NS[starts, : len(mask_A)] * mask_A)[:, None]).reshape(-1, len(mask_A))


IMAGENET_STATS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Per channel, for images in [0, 1]; used by pretrained backbones."""


def image_stats(
    metas: Sequence[DatasetMeta], needed: Mapping[str, Sequence[str]], *, imagenet: bool = False
) -> dict[str, dict[str, np.ndarray]]:
    """Return the first dataset's statistics of cameras, (3, 1, 1); images are not measured here.

    With `imagenet`, mean and std are ImageNet's, as in LeRobot.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, names in needed.items():
        meta, own = metas[0], metas[0].own(key)
        if own not in meta.cameras:
            continue
        if imagenet and set(names) <= IMAGENET_STATS.keys():
            found[key] = {name: np.array(IMAGENET_STATS[name], np.float32).reshape(CHANNELS, 1, 1) for name in names}
            continue
        stats = meta.stats.get(own, {})
        if any(name not in stats or stats[name].size != CHANNELS for name in names):
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{own}' needs statistics {', '.join(names)} of {CHANNELS} values each, which the "
                f"policy normalises images with; write them with LeRobot (lerobot.datasets.compute_stats)"
            )
        found[key] = {name: meta.stats[own][name].reshape(CHANNELS, 1, 1) for name in names}
    return found


def has_stats(metas: Sequence[DatasetMeta], key: str, names: Sequence[str]) -> bool:
    """True if the datasets' own statistics suffice."""
    return len(metas) == 1 and set(names) <= metas[0].stats.get(metas[0].own(key), {}).keys()


def measure(metas: Sequence[DatasetMeta], key: str) -> dict[str, np.ndarray]:
    """Compute all statistics of a feature over all rows."""
    return measure_rows(part for meta in metas for part in read_parts(meta, key))


def read_parts(meta: DatasetMeta, key: str) -> Iterator[np.ndarray]:
    """Yield rows of a feature, (n, D), by file, or by episode if some episodes are unreadable."""
    own = meta.own(key)
    if not meta.left_out:
        for file in dict.fromkeys(meta.data_path(position) for position in range(len(meta.episodes))):
            yield from read_file(meta, own, file)
        return
    for position in (one for one in range(len(meta.episodes)) if one not in meta.left_out):
        yield read_episode(meta, own, position)


def read_episode(meta: DatasetMeta, own: str, position: int) -> np.ndarray:
    """Read the rows of one episode, (n, D)."""
    begin, file = int(meta.episodes.data_offset[position]), meta.data_path(position)
    end = begin + int(meta.episodes.length[position])
    return _used(meta, own, file, read_rows(meta.root, file, [own], begin, end).columns[own])


def read_file(meta: DatasetMeta, own: str, file: str) -> Iterator[np.ndarray]:
    """Yield the rows of one data file in batches."""
    with opened(meta.root, file, [own]) as parquet:
        for batch in parquet.iter_batches(BATCH_ROWS, [own]):
            where = f"dataset '{meta.root.url}': {file}, column '{own}'"
            yield _used(meta, own, file, to_numpy(pa.chunked_array([batch.column(own)]), where))


def _used(meta: DatasetMeta, own: str, file: str, values: np.ndarray) -> np.ndarray:
    """Return the used dims of recorded rows, (n, D)."""
    feature, rows = meta.features[own], values.reshape(len(values), -1)
    width = int(np.prod((feature.recorded or feature).shape))
    if rows.dtype.kind not in "biuf" or rows.shape[1] != width:
        raise ValueError(
            f"dataset '{meta.root.url}': {file}, column '{own}': has rows of {rows.shape[1]} {rows.dtype.name}, expected {width} "
            f"numbers; {REMEDY}"
        )
    return rows if feature.dims is None else rows.take(feature.dims, axis=1)  # row-major, as sums depend on it


def compute_stats(values_ND: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the statistics of rows in memory."""
    values = values_ND.astype(np.float64)
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    moments = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
    }
    return moments | dict(zip(QUANTILES, quantiles, strict=True))


def measure_rows(parts: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    """Compute statistics of rows, read in parts (n, D); NaN for dims with non-finite values.

    The rows are kept in a temporary file, because the rows of a large dataset may not fit in memory.
    """
    num_rows = num_dims = 0
    with tempfile.TemporaryFile() as file:
        for part_ND in parts:
            file.write(np.ascontiguousarray(part_ND, np.float32).data)
            num_rows, num_dims = num_rows + len(part_ND), part_ND.shape[1]
        file.flush()
        rows_ND = np.memmap(file, np.float32, mode="r", shape=(num_rows, num_dims))
        with np.errstate(invalid="ignore"):  # dims without statistics
            of_dims = [compute_stats(rows_ND[:, dim : dim + 1]) for dim in range(num_dims)]
            is_finite_D = np.array([np.isfinite(rows_ND[:, dim]).all() for dim in range(num_dims)])
    found = {name: np.concatenate([stats[name] for stats in of_dims]) for name in of_dims[0]}
    return {name: np.where(is_finite_D, values, np.nan) for name, values in found.items()}
