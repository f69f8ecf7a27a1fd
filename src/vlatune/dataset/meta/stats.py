"""The statistics that normalisation needs: the dataset's own, or computed from its parquet files.

A dataset's own are used as they are, so that the numbers equal LeRobot's. They are computed, without touching video,
where they are missing (v2.1 has no quantiles), where several datasets are trained together (quantiles of parts cannot
be joined), and where the user asks for it (`--dataset.stats=computed`).

Computed ones are exact: quantiles are numpy's of all rows as float32, the type that is trained on, whatever the files
they lie in; rows of all datasets count alike. Memory is bounded: rows that take more than KEPT_BYTES are read three
times instead of being kept. Measured on one core: 0.1 s for 10^5 rows of 14 values, 0.2 s where they are not kept.

Actions that are learnt relative to the state have statistics of their own (`relative_action_stats`), which LeRobot's
`recompute_stats(relative_action=True)` writes into a dataset in place of the plain ones.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from vlatune.batch import ACTION, STATE
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.storage.parquet import opened
from vlatune.dataset.storage.tables import BATCH_ROWS, read_rows, to_numpy

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
CHANNELS = 3
REMEDY = "fetch the file anew, or correct the feature in meta/info.json"
KEPT_BYTES = 64 << 20
COUNTED_ROWS = 1 << 16
"""Rows that are counted together: the counts of a few rows cost as much as those of many."""
MAX_RELATIVE_ROWS = 1 << 21
"""Actions that relative statistics are made of: every frame begins a chunk, so there are chunk_size times as many as rows.
Of more, every second or third chunk counts, or however few fit; about 5 s on one core."""
DIGITS = ((21, 11), (10, 11), (0, 10))
"""(shift, width) of the parts in which the 32 bits of a value are looked at, the highest first."""


def feature_stats(
    metas: Sequence[DatasetMeta], key: str, names: Sequence[str], *, computed: bool = False
) -> dict[str, np.ndarray]:
    """The named statistics (q01, q99, mean, ...) of one feature over all datasets, as float64 arrays."""
    if not computed and has_stats(metas, key, names):
        own = metas[0].stats[metas[0].own(key)]
        return {name: own[name] for name in names}
    exact = measure(metas, key)
    return {name: exact[name] for name in names}


def relative_action_stats(
    metas: Sequence[DatasetMeta],
    names: Sequence[str],
    *,
    chunk_size: int,
    is_relative: Sequence[bool],
    computed: bool = False,
) -> dict[str, np.ndarray]:
    """The named statistics of actions from which the state at the beginning of their chunk was taken, in some dims.

    As LeRobot's `compute_relative_action_stats`, over all chunks that lie in one episode. A dataset's own are used if they are
    of this kind, which nothing in it says: they are nearer to these than to those of the actions as they are.
    """

    def read() -> Iterator[np.ndarray]:
        return _relative_parts(metas, chunk_size, np.array(is_relative, np.float32))

    exact = measure_rows(read)
    if not computed and has_stats(metas, ACTION, names):
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


def _relative_parts(metas: Sequence[DatasetMeta], chunk_size: int, mask_A: np.ndarray) -> Iterator[np.ndarray]:
    """Relative actions of whole chunks, (n, A), episode by episode; where all episodes are shorter, of the longest chunk."""
    readable = [(meta, one) for meta in metas for one in range(len(meta.episodes)) if one not in meta.left_out]
    lengths = [int(meta.episodes.length[position]) for meta, position in readable]
    size = min(chunk_size, max(lengths))
    every = -(-sum(max(0, length - size + 1) for length in lengths) * size // MAX_RELATIVE_ROWS)
    begun = 0
    for (meta, position), length in zip(readable, lengths, strict=True):
        num_starts = max(0, length - size + 1)
        starts = np.arange(-begun % every, num_starts, every)
        begun += num_starts
        if len(starts):
            state_NS, action_NA = (
                read_episode(meta, meta.own(key), position).astype(np.float32) for key in (STATE, ACTION)
            )
            chunks_NTA = action_NA[starts[:, None] + np.arange(size)]
            yield (chunks_NTA - (state_NS[starts, : len(mask_A)] * mask_A)[:, None]).reshape(-1, len(mask_A))


IMAGENET_STATS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Of pictures in [0, 1], by channel: what pretrained backbones were trained with."""


def picture_stats(
    metas: Sequence[DatasetMeta], needed: Mapping[str, Sequence[str]], *, imagenet: bool = False
) -> dict[str, dict[str, np.ndarray]]:
    """Those of the cameras among the features, (3, 1, 1): the first dataset's own, as pictures are not measured here.

    With `imagenet`, mean and deviation are ImageNet's, whatever the dataset has, as in LeRobot.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, names in needed.items():
        meta, own = metas[0], metas[0].own(key)
        if own not in meta.cameras:
            continue
        if imagenet and set(names) <= IMAGENET_STATS.keys():
            found[key] = {name: np.array(IMAGENET_STATS[name], np.float32).reshape(CHANNELS, 1, 1) for name in names}
            continue
        missing = [name for name in names if name not in meta.stats.get(own, {})]
        if missing:
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{own}' has no statistics {', '.join(missing)}, which the policy normalises "
                f"pictures with; write them with LeRobot (lerobot.datasets.compute_stats)"
            )
        if any(meta.stats[own][name].size != CHANNELS for name in names):
            raise ValueError(
                f"dataset '{meta.root.url}': camera '{own}': its statistics must be {CHANNELS} values each; fetch meta anew"
            )
        found[key] = {name: meta.stats[own][name].reshape(CHANNELS, 1, 1) for name in names}
    return found


def has_stats(metas: Sequence[DatasetMeta], key: str, names: Sequence[str]) -> bool:
    """Whether the datasets' own statistics will do."""
    return len(metas) == 1 and set(names) <= metas[0].stats.get(metas[0].own(key), {}).keys()


def measure(metas: Sequence[DatasetMeta], key: str) -> dict[str, np.ndarray]:
    """All statistics of one feature over all rows."""

    def read() -> Iterator[np.ndarray]:
        return (part for meta in metas for part in read_parts(meta, key))

    values_per_row = int(np.prod(metas[0].features[metas[0].own(key)].shape))
    if sum(meta.num_frames for meta in metas) * values_per_row * 4 > KEPT_BYTES:
        return measure_rows(read)
    kept = list(read())
    return measure_rows(lambda: iter(kept))


def read_feature(metas: Sequence[DatasetMeta], key: str) -> np.ndarray:
    """All rows of a feature, (N, D), but for those of episodes that are left out."""
    return np.concatenate([part for meta in metas for part in read_parts(meta, key)])


def read_parts(meta: DatasetMeta, key: str) -> Iterator[np.ndarray]:
    """Rows of a feature, (n, D), file by file; where some episodes cannot be read, episode by episode."""
    own = meta.own(key)
    if not meta.left_out:
        for file in dict.fromkeys(meta.data_path(position) for position in range(len(meta.episodes))):
            yield from read_file(meta, own, file)
        return
    for position in (one for one in range(len(meta.episodes)) if one not in meta.left_out):
        yield read_episode(meta, own, position)


def read_episode(meta: DatasetMeta, own: str, position: int) -> np.ndarray:
    """Rows of one episode, (n, D)."""
    begin = int(meta.episodes.data_offset[position])
    end = begin + int(meta.episodes.length[position])
    rows = read_rows(meta.root, meta.data_path(position), [own], begin, end)
    return _flat(rows.columns[own][begin - rows.begin : end - rows.begin])


def read_file(meta: DatasetMeta, own: str, file: str) -> Iterator[np.ndarray]:
    """Rows of one data file, some thousand at a time."""
    width = int(np.prod(meta.features[own].shape))
    with opened(meta.root, file, [own]) as parquet:
        for batch in parquet.iter_batches(BATCH_ROWS, columns=[own], use_threads=False):
            where = f"dataset '{meta.root.url}': {file}, column '{own}'"
            rows = _flat(to_numpy(pa.chunked_array([batch.column(own)]), where))
            if rows.dtype.kind not in "biuf" or rows.shape[1] != width:
                raise ValueError(
                    f"{where}: has rows of {rows.shape[1]} {rows.dtype.name}, expected {width} numbers; {REMEDY}"
                )
            yield rows


def _flat(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(len(rows), -1)


def compute_stats(values_ND: np.ndarray) -> dict[str, np.ndarray]:
    """Of rows that are in memory."""
    values = values_ND.astype(np.float64)
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    moments = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
    }
    return moments | dict(zip(QUANTILES, quantiles, strict=True))


def measure_rows(read: Callable[[], Iterable[np.ndarray]]) -> dict[str, np.ndarray]:
    """The same of rows that may be read several times, (n, D) at a time; a dim with a value that is not finite has none."""
    moments = Moments()
    for part_ND in _joined(read()):
        moments.add(part_ND)
    last = moments.num_rows - 1
    wanted = np.array(list(QUANTILES.values())) * last
    ranks = np.concatenate([np.floor(wanted), np.ceil(wanted)]).astype(np.int64)
    low_QD, high_QD = np.split(_values_at(lambda: _joined(read()), ranks, moments.num_dims), 2)
    with np.errstate(invalid="ignore"):  # of dims that have no statistics
        between_QD = _between(low_QD, high_QD, (wanted - np.floor(wanted))[:, None])
    found = moments.stats() | dict(zip(QUANTILES, between_QD, strict=True))
    return {name: np.where(moments.is_finite_D, values, np.nan) for name, values in found.items()}


@dataclass
class Moments:
    """Sums over rows that come in parts; float64, in the order in which they come."""

    num_rows: int = 0
    num_dims: int = 0
    mean_D: np.ndarray | float = 0.0
    squares_D: np.ndarray | float = 0.0
    """Sum of the squared distances to the mean."""
    min_D: np.ndarray | float = np.inf
    max_D: np.ndarray | float = -np.inf
    is_finite_D: np.ndarray | bool = True

    def add(self, part_ND: np.ndarray) -> None:
        if len(part_ND) == 0:
            return
        finite = np.isfinite(part_ND)
        part = np.where(finite, part_ND, 0.0).astype(np.float64)
        total = self.num_rows + len(part)
        mean, apart = part.mean(axis=0), part.mean(axis=0) - self.mean_D
        self.squares_D = self.squares_D + ((part - mean) ** 2).sum(axis=0)
        self.squares_D = self.squares_D + apart**2 * self.num_rows * len(part) / total
        self.mean_D = self.mean_D + apart * len(part) / total
        self.min_D, self.max_D = np.minimum(self.min_D, part.min(axis=0)), np.maximum(self.max_D, part.max(axis=0))
        self.is_finite_D = np.logical_and(self.is_finite_D, finite.all(axis=0))
        self.num_rows, self.num_dims = total, part.shape[1]

    def stats(self) -> dict[str, np.ndarray]:
        std = np.sqrt(np.asarray(self.squares_D) / self.num_rows)
        return {
            "min": np.asarray(self.min_D),
            "max": np.asarray(self.max_D),
            "mean": np.asarray(self.mean_D),
            "std": std,
        }


def _joined(parts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Parts as float32, many rows at a time."""
    waiting: list[np.ndarray] = []
    for part in parts:
        waiting.append(part.astype(np.float32, copy=False))
        if sum(map(len, waiting)) >= COUNTED_ROWS:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)


def _values_at(read: Callable[[], Iterable[np.ndarray]], ranks_R: np.ndarray, dims: int) -> np.ndarray:
    """The values at these places of each dim's sorted rows, (R, D), without sorting them.

    A value's bits, as a whole number that grows with it, are found from the highest on: count how many rows begin with
    each of the next digits, and take the digit within whose rows the place lies.
    """
    begun = np.zeros((dims, len(ranks_R)), np.uint64)
    rank = np.broadcast_to(ranks_R, begun.shape).copy()
    for shift, width in DIGITS:
        counts = np.zeros((*begun.shape, 1 << width), np.int64)
        for part_ND in read():
            bits_DN = _rising_bits(part_ND.T)
            for dim, bits in enumerate(bits_DN):
                _count(bits, begun[dim], shift, width, counts[dim])
        up_to = counts.cumsum(axis=2)
        digit = (up_to <= rank[..., None]).sum(axis=2)
        rank -= np.where(digit > 0, np.take_along_axis(up_to, np.maximum(digit - 1, 0)[..., None], axis=2)[..., 0], 0)
        begun = (begun << np.uint64(width)) | digit.astype(np.uint64)
    return _from_bits(begun.astype(np.uint32)).T.astype(np.float64)


def _count(bits: np.ndarray, begun_R: np.ndarray, shift: int, width: int, counts_RW: np.ndarray) -> None:
    """Add, for each beginning, the rows that have it by their next digit."""
    beginnings, digits = bits >> np.uint64(shift + width), (bits >> np.uint64(shift)) & np.uint64((1 << width) - 1)
    for begun in np.unique(begun_R):
        found = np.bincount(digits[beginnings == begun].astype(np.int64), minlength=1 << width)
        counts_RW[begun_R == begun] += found


def _rising_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> whole numbers in the same order: the sign's bit turned, and all bits of what is below zero."""
    bits = (np.ascontiguousarray(values, np.float32) + np.float32(0.0)).view(np.uint32)  # -0.0 is 0.0
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)


def _from_bits(rising: np.ndarray) -> np.ndarray:
    return np.where(rising >> 31, rising & np.uint32((1 << 31) - 1), ~rising).astype(np.uint32).view(np.float32)


def _between(low: np.ndarray, high: np.ndarray, share: np.ndarray) -> np.ndarray:
    """As numpy does it, to the last bit."""
    apart = high - low
    return np.where(share >= 0.5, high - apart * (1 - share), low + apart * share)
