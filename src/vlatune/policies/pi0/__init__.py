"""PI0, PI0.5's predecessor: metadata here, code with PI0.5's in `pi05`.

The state is a token of the action expert instead of text in the prompt, and the flow time is part
of the action tokens instead of a scale of the expert's norms. The recipe uses LeRobot's training
presets (`PI0Config`).
"""

from vlatune.config.settings import PolicyConfig
from vlatune.policies.pi05 import POLICY as PI05
from vlatune.policies.pi05 import Pi0Options, make_recipe, make_tiny_recipe
from vlatune.registry import PolicyInfo

HUB_BASE = "lerobot/pi0_base"


POLICY = PolicyInfo(
    type="pi0",
    title="PI0",
    adapter="vlatune.policies.pi05.adapter:Pi0Adapter",
    train_modes=PI05.train_modes,
    recipes={
        "pi0": make_recipe(
            "PI0, the action expert and its projections; the vision-language model is frozen",
            PolicyConfig(type="pi0", path=HUB_BASE, dtype="bfloat16", train="expert"),
            batch_size=8,
        ),
        "pi0-tiny": make_tiny_recipe(
            "a tiny PI0 that trains on a CPU in minutes; used by `vlatune demo --policy=pi0`", "pi0"
        ),
    },
    options=Pi0Options,
    settings=PI05.settings,
    shards=PI05.shards,
    hub_base=HUB_BASE,
    max_dims=PI05.max_dims,
    has_prompt=True,
)
