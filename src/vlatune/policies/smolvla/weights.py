"""Build LeRobot's SmolVLA for a folder, and decide what trains and in which dtype.

Trainable weights are float32, others have the requested dtype. The unused vocabulary head is not
loaded; an export reads it from the base.
"""

import re
from dataclasses import replace
from pathlib import Path

import torch
from lerobot.policies.smolvla import SmolVLAConfig, SmolVLAPolicy

from vlatune.policies.base import ModuleOptions
from vlatune.policies.loading import decode_config, parameters_on_meta, put, round_input
from vlatune.policies.model_size import building_at
from vlatune.policies.modeling import ADAPTER
from vlatune.policies.smolvla.size import SmolVLASpec

STATE_PROJECTION = r"model\.state_proj\."
HEADS = r"model\.(state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out)\."
EXPERT = r"model\.vlm_with_expert\.lm_expert\."
TOWER = r"model\.vlm_with_expert\.vlm\.model\.vision_model\."
TRAINED = {
    "heads": HEADS,
    "expert": f"{HEADS}|{EXPERT}",
    "lora": rf"{HEADS}|.*\.lora_(A|B)\.{ADAPTER}\.",
    "language": rf"(?!{TOWER})model\.",
    "full": r"model\.",
}
"""Parameters of each fine-tuning mode. LeRobot's flags: expert is train_expert_only, language is
freeze_vision_encoder without it, full is neither."""
ADAPTED = r".*\.(text_model|lm_expert)\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"


def set_dtypes(policy: SmolVLAPolicy, options: ModuleOptions) -> None:
    """Drop the unused head and round what does not train."""
    policy.model.vlm_with_expert.vlm.lm_head = None  # pyright: ignore[reportAttributeAccessIssue]
    for name, parameter in list(policy.named_parameters()):
        # Unused parameters in layers that train are float32, too: a layer has one dtype.
        if options.dtype == "bfloat16" and not re.match(f"{TRAINED[options.train]}|{HEADS}", name):
            put(policy, name, parameter.detach().to(torch.bfloat16))
    # The dtypes differ if the tower is frozen and the projection after it trains.
    policy.model.vlm_with_expert.get_vlm_model().connector.modality_projection.proj.register_forward_pre_hook(
        round_input
    )


def build_policy(spec: SmolVLASpec, dtype: str | None = None) -> SmolVLAPolicy:
    """Build LeRobot's class with parameters on the meta device."""
    config = decode_config(Path(spec.folder), SmolVLAConfig)
    config.compile_model = False  # decided by ModuleOptions
    building = {
        "num_vlm_layers": 0,  # build only the layers that are used
        "load_vlm_weights": False,
        "train_expert_only": False,  # decided by `FlowModule.load`
        "freeze_vision_encoder": False,
        "device": None,  # the constructor would move parameters on the meta device
    }
    stored = {name: getattr(config, name) for name in building} | {"device": "cpu"}
    vars(config).update(building)
    with building_at(replace(spec.size.vlm, depth=spec.size.depth)), parameters_on_meta():
        policy = SmolVLAPolicy(config)
    vars(config).update(stored)
    return policy


def unused(policy: SmolVLAPolicy, spec: SmolVLASpec) -> str:
    """Match what never trains: the last layer the expert attends to and those after it, as in LeRobot."""
    last = "|".join(str(layer) for layer in range(spec.size.last_used, spec.size.depth))
    state = "" if policy.config.train_state_proj else f"|{STATE_PROJECTION}"
    return rf"\.lm_head\.|\.text_model\.norm\.|\.text_model\.layers\.({last})\.{state}"
