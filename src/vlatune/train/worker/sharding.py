"""Shard a policy over the workers with FSDP2 (`--fsdp`). No Ray, no host sync.

Every worker holds a part of each weight, gradient and optimizer state, frozen weights included. A
layer is gathered for its forward and its backward pass; what is outside of layers (embeddings,
projections, last norms) is gathered for the whole step. Gradients are exchanged in every micro-step:
accumulating them first would need memory for all of them.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


def shard_module(module: nn.Module, device: torch.device, num_workers: int) -> None:
    """Shard a loaded `FlowModule` in place; its parameters become DTensors."""
    policy: Any = module
    mesh = init_device_mesh(device.type, (num_workers,))
    layers = [one.layer for one in policy.layers()]
    for part in (*policy.tower_layers(), *layers, module):
        # Only NCCL can average.
        fully_shard(part, mesh=mesh).set_force_sum_reduction_for_comms(device.type != "cuda")
    for layer in layers:
        register_fsdp_forward_method(layer, "compute")
    register_fsdp_forward_method(module, "predict")
