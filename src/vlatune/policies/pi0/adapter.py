"""PI0 without torch, where it differs from PI0.5 (`pi05/adapter.py`).

The prompt is the task and a newline; the state is passed to the model as numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vlatune.policies.pi05.adapter import CONFIG_FIELDS, Pi05Adapter
from vlatune.policies.pi05.spec import PI0
from vlatune.policies.processors import Schema
from vlatune.policies.tokenizer import NewlinePrompt

if TYPE_CHECKING:
    import torch

    from vlatune.data.transforms import Transform
    from vlatune.policies.base import Binding

SCHEMA = Schema(type="pi0", config=CONFIG_FIELDS, steps={"pi0_new_line_processor": {}})


class Pi0Adapter(Pi05Adapter):
    kind = PI0
    schema = SCHEMA

    def make_prompt(self, binding: Binding) -> Transform:
        return NewlinePrompt()

    def loader(self) -> Callable[..., torch.nn.Module]:
        from vlatune.policies.pi0.model import load_pi0

        return load_pi0
