"""PI0: PI0.5's predecessor, made of the same parts. Its card is here; what differs is in `pi0_adapter.py` and `pi0_module.py`.

The state is a token of the action expert's instead of words in the prompt, and the flow time a part of the action tokens
instead of a scale of the expert's norms. The numbers of the recipe are LeRobot's own training presets of PI0 (`PI0Config`).
"""

from typing import TYPE_CHECKING

from vlatune.policies.pi05 import POLICY as PI05
from vlatune.policies.pi05 import PRESETS
from vlatune.policies.registry import Policy, Recipe

if TYPE_CHECKING:
    from vlatune.policies.pi0.pi0_adapter import Pi0Adapter

HUB_BASE = "lerobot/pi0_base"


def _adapter() -> "Pi0Adapter":
    from vlatune.policies.pi0.pi0_adapter import Pi0Adapter

    return Pi0Adapter()


POLICY = Policy(
    type="pi0",
    title="PI0",
    adapter=_adapter,
    train_ways=PI05.train_ways,
    recipes={
        "pi0": Recipe(
            "PI0, the action expert and its projections; the vision-language model stays as it is",
            PRESETS
            | {
                "policy": {"type": "pi0", "path": HUB_BASE, "dtype": "bfloat16", "train": "expert"},
                "batch_size": 8,
            },
        ),
        "pi0-tiny": Recipe(
            "a small PI0 on the CPU, in minutes; what `vlatune demo --policy=pi0` trains",
            {**PI05.recipes["tiny"].values, "policy": {"type": "pi0", "train": "full", "dtype": "float32"}},
            small=True,
        ),
    },
    settings=PI05.settings,
    hub_base=HUB_BASE,
    max_dims=PI05.max_dims,
    has_prompt=True,
    overrides=PI05.overrides,
)
