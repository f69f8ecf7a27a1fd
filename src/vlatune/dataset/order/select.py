"""Which episodes are trained on and which are held out, and how a flat sample number finds its episode. Pure.

The held-out episodes are a function of (seed, number of episodes, share): the same for training, evaluation
and every restart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlatune.dataset.meta.dataset_meta import DatasetMeta


@dataclass(frozen=True)
class Selection:
    """Episodes of all datasets in one list; flat sample numbers count over it."""

    dataset: np.ndarray
    position: np.ndarray
    """Place in that dataset's episode table."""
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.dataset)


def select_episodes(metas: Sequence[DatasetMeta], wanted: Sequence[int] | None) -> Selection:
    """All episodes, or those whose episode_index is wanted, of every dataset."""
    parts = [_wanted_positions(meta, wanted) for meta in metas]
    return Selection(
        dataset=np.concatenate([np.full(len(part), number) for number, part in enumerate(parts)]),
        position=np.concatenate(parts),
        length=np.concatenate([meta.episodes.length[part] for meta, part in zip(metas, parts, strict=True)]),
    )


def hold_out(selection: Selection, share: float, seed: int) -> tuple[Selection, Selection]:
    """(training, held out); at least one episode is held out when the share is above 0 and there are two."""
    count = len(selection)
    held = 0 if share == 0 or count < 2 else min(count - 1, max(1, round(share * count)))
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.Generator(np.random.Philox(key=seed)).permutation(count)[:held]] = True
    return pick(selection, ~chosen), pick(selection, chosen)


def hold_out_each(selection: Selection, share: float, seed: int) -> tuple[Selection, Selection]:
    """The same share of every dataset's episodes, so that each can be evaluated by itself."""
    numbers = np.unique(selection.dataset)
    parts = [hold_out(pick(selection, selection.dataset == number), share, seed) for number in numbers]
    return _joined([training for training, _ in parts]), _joined([held for _, held in parts])


def _joined(parts: Sequence[Selection]) -> Selection:
    columns = ([getattr(part, name) for part in parts] for name in ("dataset", "position", "length"))
    return Selection(*map(np.concatenate, columns))


def pick(selection: Selection, mask: np.ndarray) -> Selection:
    """The episodes where the mask is true."""
    return Selection(selection.dataset[mask], selection.position[mask], selection.length[mask])


def _wanted_positions(meta: DatasetMeta, wanted: Sequence[int] | None) -> np.ndarray:
    if wanted is None:
        return np.arange(len(meta.episodes))
    missing = sorted(set(wanted) - set(meta.episodes.index.tolist()))
    if missing:
        raise ValueError(
            f"dataset '{meta.root.url}': there is no episode {missing[0]}; it has {len(meta.episodes)} episodes, "
            f"{meta.episodes.index[0]} to {meta.episodes.index[-1]}; correct the list of episodes"
        )
    return np.flatnonzero(np.isin(meta.episodes.index, list(wanted)))
