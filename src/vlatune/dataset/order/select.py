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


def pick(selection: Selection, mask: np.ndarray) -> Selection:
    """The episodes where the mask is true."""
    return Selection(selection.dataset[mask], selection.position[mask], selection.length[mask])


def drop_last_frames(selection: Selection, count: int) -> Selection:
    """Without the last frames of each episode, as LeRobot's sampler drops them; an episode that has no others goes whole.

    Frames keep their numbers, as those before the dropped ones do not move.
    """
    if count == 0:
        return selection
    longer = pick(selection, selection.length > count)
    if len(longer) == 0:
        raise ValueError(
            f"the policy leaves the last {count} frames of each episode out (drop_n_last_frames), and no episode to train on has "
            f"more; use a base with a smaller number, or longer episodes"
        )
    return Selection(longer.dataset, longer.position, longer.length - count)


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
