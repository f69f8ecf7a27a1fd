"""An exponential moving average of the trained weights, kept on the device beside them.

`average <- decay * average + (1 - decay) * weight` after every optimizer step, beginning with the base's weights.
Evaluation and export take the average where there is one; training goes on with the weights themselves.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class Ema:
    def __init__(self, trainable: Mapping[str, Tensor], decay: float) -> None:
        self._weights = dict(trainable)
        # float32 whatever the weights are: with a decay of 0.999 a bfloat16 average would never move.
        self._averages = {name: weight.detach().to(torch.float32, copy=True) for name, weight in trainable.items()}
        self._new_share = 1.0 - decay

    @torch.no_grad()
    def update(self) -> None:
        """One kernel for all weights; no host sync."""
        weights = [weight.float() for weight in self._weights.values()]
        averages = list(self._averages.values())
        torch._foreach_lerp_(averages, weights, self._new_share)  # pyright: ignore[reportPrivateImportUsage]

    def tensors(self) -> dict[str, Tensor]:
        """The averages under the weights' names: the tensors themselves, so that what is copied into them counts."""
        return dict(self._averages)
