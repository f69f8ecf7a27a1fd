"""Random generators of a run, each a pure function of a stream and some numbers.

No generator state has to be saved, and streams with the same numbers are independent.
"""

from enum import IntEnum

import numpy as np

ORDER_VERSION = 3
"""Version of sample order and noise; a checkpoint with another version cannot be resumed.

Increase it with every change that gives a run another sample order or other noise.
"""
MIXED_ORDER_VERSION = 4
"""`ORDER_VERSION` of runs on several datasets."""


class Stream(IntEnum):
    """Purpose of a generator; the members list the numbers that seed it."""

    ORDER = 1
    """(seed, epoch): order of the runs of frames."""
    WINDOW = 9
    """(seed, epoch, lane, first position in the lane): order of the samples of a window."""
    NOISE = 2
    """(seed, slot): noise and time of a training sample."""
    MIXTURE = 3
    """(seed, dataset, pass): runs of frames that a dataset contributes to a mixture."""
    EVAL_NOISE = 4
    """(seed, index in its dataset): noise and time of a validation sample."""
    CROP = 8
    """(seed, slot): crop of a training sample's images."""
    AUGMENTATION = 5
    """(seed, slot, camera): augmentation of a training sample's images."""


def make_generator(stream: Stream, *numbers: int) -> np.random.Generator:
    words = [int(stream), *numbers]
    # An array gives the same seed as a list, but faster.
    seed = np.array(words, np.uint32) if max(words) < 2**32 else words
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
