"""PI0, the side without torch: what differs from PI0.5's (`pi05/adapter.py`).

The prompt is the sentence and a newline; the state goes to the model as numbers. The torch side is `pi0_module.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vlatune.policies.pi05.adapter import CONFIG_FIELDS, Pi05Adapter
from vlatune.policies.pi05.weights import PI0
from vlatune.policies.processors import Schema
from vlatune.policies.tokenizer import NewlinePrompt

if TYPE_CHECKING:
    import torch

    from vlatune.pipeline.transforms import Transform
    from vlatune.policies.base import Binding

SCHEMA = Schema(type="pi0", config=CONFIG_FIELDS, steps={"pi0_new_line_processor": {}})


class Pi0Adapter(Pi05Adapter):
    kind = PI0
    schema = SCHEMA

    def make_prompt(self, binding: Binding) -> Transform:
        return NewlinePrompt()

    def loader(self) -> Callable[..., torch.nn.Module]:
        from vlatune.policies.pi0.pi0_module import load_pi0

        return load_pi0
