"""Exact statistics of uint8 pictures in LeRobot's form, from counts: a picture is looked at once and not kept.

Legend: C channels, V pixel values 0 to 255.
"""

import numpy as np

from vlatune.dataset.meta.stats import QUANTILES


class PixelCounts:
    """How often each channel of some uint8 pictures had each value: all that exact statistics need."""

    def __init__(self) -> None:
        self.num_images = 0
        self.counts_CV = np.zeros((3, 256), np.int64)

    def add(self, image_HWC: np.ndarray) -> None:
        self.num_images += 1
        for channel in range(3):
            self.counts_CV[channel] += np.bincount(image_HWC[..., channel].reshape(-1), minlength=256)

    def merge(self, other: "PixelCounts") -> None:
        self.num_images += other.num_images
        self.counts_CV += other.counts_CV

    def stats(self) -> dict[str, np.ndarray]:
        """Per channel, shape (3, 1, 1), scaled to [0, 1]; `count` is the number of pictures."""
        per_channel = [_counted_stats(counts_V) for counts_V in self.counts_CV]
        scaled = {
            name: np.array([stats[name] for stats in per_channel]).reshape(3, 1, 1) / 255.0 for name in per_channel[0]
        }
        return {**scaled, "count": np.array([self.num_images])}


def _counted_stats(counts_V: np.ndarray) -> dict[str, float]:
    """Statistics of values 0 to 255, given how often each occurs."""
    values_V, total = np.arange(256), counts_V.sum()
    present = np.flatnonzero(counts_V)
    mean = (values_V * counts_V).sum() / total
    variance = ((values_V - mean) ** 2 * counts_V).sum() / total
    quantiles = {name: _counted_quantile(counts_V, share) for name, share in QUANTILES.items()}
    return {"min": present[0], "max": present[-1], "mean": mean, "std": np.sqrt(variance), **quantiles}


def _counted_quantile(counts_V: np.ndarray, share: float) -> float:
    """NumPy's linear quantile of the sorted values, without sorting or even having them."""
    last_of_value_V = counts_V.cumsum()  # values below v fill the sorted positions up to last_of_value_V[v] - 1
    position = share * (last_of_value_V[-1] - 1)
    lower, upper = np.searchsorted(last_of_value_V, [np.floor(position), np.ceil(position)], side="right")
    return float(lower + (upper - lower) * (position - np.floor(position)))
