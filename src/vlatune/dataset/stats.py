"""The statistics that normalisation needs: the dataset's own, or computed from its parquet files.

A dataset's own are used as they are, so that the numbers equal LeRobot's. They are computed, exactly and
without touching video, where they are missing (v2.1 has no quantiles) and where several datasets are
trained together (quantiles of parts cannot be joined).
"""

from collections.abc import Iterator, Sequence

import numpy as np

from vlatune.dataset.meta import DatasetMeta
from vlatune.dataset.tables import read_columns, read_rows

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def feature_stats(metas: Sequence[DatasetMeta], key: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The named statistics (q01, q99, mean, ...) of one feature over all datasets, as float64 arrays."""
    if len(metas) == 1 and all(name in metas[0].stats.get(key, {}) for name in names):
        return {name: metas[0].stats[key][name] for name in names}
    computed = compute_stats(read_feature(metas, key))
    return {name: computed[name] for name in names}


def read_feature(metas: Sequence[DatasetMeta], key: str) -> np.ndarray:
    """All rows of a feature, (N, D), but for those of episodes that are left out."""
    return np.concatenate([rows.reshape(len(rows), -1) for meta in metas for rows in _read_parts(meta, key)])


def _read_parts(meta: DatasetMeta, key: str) -> Iterator[np.ndarray]:
    """File by file; where some episodes cannot be read, episode by episode."""
    if not meta.left_out:
        for file in dict.fromkeys(meta.data_path(position) for position in range(len(meta.episodes))):
            yield read_columns(meta.root, file, [key])[key]
        return
    for position in (one for one in range(len(meta.episodes)) if one not in meta.left_out):
        begin = int(meta.episodes.data_offset[position])
        end = begin + int(meta.episodes.length[position])
        rows = read_rows(meta.root, meta.data_path(position), [key], begin, end)
        yield rows.columns[key][begin - rows.begin : end - rows.begin]


def compute_stats(values_ND: np.ndarray) -> dict[str, np.ndarray]:
    values = values_ND.astype(np.float64)
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    moments = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
    }
    return moments | dict(zip(QUANTILES, quantiles, strict=True))
