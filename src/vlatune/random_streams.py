"""Every generator that decides what a run learns: a stream and some numbers -> a generator of its own. Pure.

Nothing has to be saved to draw again what was drawn, and one stream never gives what another does, though all of them
are seeded with the same numbers.
"""

from enum import IntEnum

import numpy as np

ORDER_VERSION = 2
"""Raised with every change that gives a run another order of samples or other draws: a checkpoint carries it, and a run
that would go on with another order is refused."""
MIXED_ORDER_VERSION = 3
"""The same for a run on several datasets."""


class Stream(IntEnum):
    """What a generator is for, and the numbers that it is made of."""

    ORDER = 1
    """(seed, epoch): the order of samples."""
    NOISE = 2
    """(seed, place in the run's order): noise and time of a training sample."""
    MIXTURE = 3
    """(seed, dataset, pass): the runs of frames that a dataset gives to a mixture."""
    EVAL_NOISE = 4
    """(seed, dataset, frame): noise and time of a validation sample."""
    CROP = 8
    """(seed, place in the run's order): where the pictures of a training sample are cropped."""
    PICTURES = 5
    """(seed, place in the run's order, camera): how a training sample's pictures are augmented."""


def make_generator(stream: Stream, *numbers: int) -> np.random.Generator:
    words = [int(stream), *numbers]
    # The same seed as of the list, in a third of the time: a list is made of single words first.
    seed = np.array(words, np.uint32) if max(words) < 2**32 else words
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
