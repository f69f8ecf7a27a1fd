"""PI0 in torch: PI0.5's module with a state token, and with the time in the action tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vlatune.batch import STATE
from vlatune.policies.base import Binding, ModuleOptions, PolicySpec
from vlatune.policies.modeling import repeat_each
from vlatune.policies.pi05.model import Pi05Module, Suffix, load_pi05


class Pi0Module(Pi05Module):
    """A `PI0Policy` that takes batches as `batch.py` describes them."""

    def embed_suffix(self, batch: Mapping[str, Tensor], noisy_BTP: Tensor, time_code_BD: Tensor) -> Suffix:
        """Return the state token, which attends to no action, and a token per action with the time.

        The state has one row per observation, the actions one per noise sample, adjacent.
        """
        model: Any = self.policy.model
        state_BP = self._state(batch)
        state_B1D = repeat_each(model.state_proj(state_BP)[:, None], len(noisy_BTP) // len(state_BP))
        action_BTD = model.action_in_proj(noisy_BTP)
        mixed_BTD = torch.cat([action_BTD, time_code_BD[:, None].expand_as(action_BTD)], dim=2)
        mixed_BTD = model.action_time_mlp_out(functional.silu(model.action_time_mlp_in(mixed_BTD)))
        return Suffix(torch.cat([state_B1D, mixed_BTD], dim=1), time_BD=None, num_blind=1)

    def observation(self, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        return (*super().observation(batch), self._state(batch))

    def _state(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Pad the state with zeros to the policy's number of dims."""
        dims = self.policy.config.max_state_dim
        return functional.pad(batch[STATE], (0, dims - batch[STATE].shape[1]))


def load_pi0(
    spec: PolicySpec, binding: Binding, options: ModuleOptions, device: torch.device | str = "cpu"
) -> Pi05Module:
    return load_pi05(spec, binding, options, device, module=Pi0Module)
