"""Estimate time and price of a run on named GPUs, before it is paid for.

    kernels of a micro-step     counted on the meta device, at the run's batch size, forward and backward
    + clipping, AdamW, EMA      bytes of the trained parameters
    + exchange of gradients     all-reduce of the trained parameters, if there are several workers

A kernel takes the longest of its products at half of the device's peak, its bytes at 85 % of the
memory's bandwidth, and the shortest time of any kernel. A step takes the sum, or the time the host needs to launch
all kernels if that is longer. See docs/hardware.md for the sources of the figures.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from vlatune.checks.device_memory import GB, rows_of
from vlatune.config.settings import RunConfig
from vlatune.formatting import format_number, format_seconds, plural, text_table

TERA = 10**12
PRODUCT_SHARE, TRAFFIC_SHARE = 0.5, 0.85
"""Shares of the peak figures that kernels reach."""
LAUNCH_S, SHORTEST_S = 10e-6, 3e-6
"""Host time to launch a kernel from Python, and the shortest time of a kernel on a GPU."""
STEP_BYTES, EMA_BYTES, ACCUM_BYTES = 40, 12, 12
"""Bytes per trained parameter: clipping and AdamW; the moving average; adding a micro-step's gradient."""


class Kernel(NamedTuple):
    """One operator of a step."""

    flops: float
    num_bytes: float
    """Bytes read and written."""
    is_half: bool = False
    """True for products in 16 bits; others use TF32 on a GPU."""


@dataclass(frozen=True)
class Device:
    """Public figures of a device."""

    name: str
    half_flops: float
    """Peak of dense products in bfloat16, per second."""
    float_flops: float
    """Peak of dense products of float32 tensors (TF32), per second."""
    bytes_per_s: float
    """Peak bandwidth of its memory."""
    memory_bytes: float
    exchange_bytes_per_s: float
    """Rate of an all-reduce between the GPUs of a node."""
    usd_per_hour: float
    """Typical price of one on demand."""
    product_share: float = PRODUCT_SHARE
    traffic_share: float = TRAFFIC_SHARE
    launch_s: float = LAUNCH_S
    shortest_s: float = SHORTEST_S
    is_asynchronous: bool = True
    """True if the host launches kernels while others run."""


DEVICES = (
    Device("L4", 121 * TERA, 60 * TERA, 300 * GB, 24 * GB, 10 * GB, 0.78),
    Device("A10G", 70 * TERA, 35 * TERA, 600 * GB, 24 * GB, 10 * GB, 1.01),
    Device("A100 80GB", 312 * TERA, 156 * TERA, 2039 * GB, 80 * GB, 200 * GB, 1.79),
    Device("H100", 989 * TERA, 495 * TERA, 3350 * GB, 80 * GB, 350 * GB, 3.99),
    Device("RTX 4090", 165 * TERA, 83 * TERA, 1008 * GB, 24 * GB, 10 * GB, 0.69),
)


@dataclass(frozen=True)
class StepWork:
    """Work of one worker in an optimizer step."""

    micro_step: Sequence[Kernel]
    micro_steps: int
    trained: int
    """Number of trained parameters."""
    num_workers: int = 1
    ema: bool = False
    tensors: int = 1
    """Number of trained tensors; a GPU updates them together, a CPU one by one."""

    def update(self, device: Device) -> list[Kernel]:
        """Return the kernels that follow the last micro-step."""
        parts = 1 if device.is_asynchronous else self.tensors
        each = [STEP_BYTES, *([EMA_BYTES] if self.ema else []), *([ACCUM_BYTES] * (self.micro_steps - 1))]
        return [Kernel(0.0, size * self.trained / parts) for size in each for _ in range(parts)]


def kernels_s(kernels: Sequence[Kernel], device: Device) -> float:
    """Return the seconds that a device needs for some kernels."""
    products = {True: device.half_flops * device.product_share, False: device.float_flops * device.product_share}
    traffic = device.bytes_per_s * device.traffic_share
    busy = sum(max(one.flops / products[one.is_half], one.num_bytes / traffic, device.shortest_s) for one in kernels)
    launched = device.launch_s * len(kernels)
    return max(busy, launched) if device.is_asynchronous else busy + launched


def exchange_s(work: StepWork, device: Device) -> float:
    """Return the seconds of a ring all-reduce of float32 gradients."""
    return 2 * (work.num_workers - 1) / work.num_workers * 4 * work.trained / device.exchange_bytes_per_s


def step_s(work: StepWork, device: Device) -> float:
    """Return the seconds of an optimizer step."""
    micro_s = work.micro_steps * kernels_s(work.micro_step, device)
    return micro_s + kernels_s(work.update(device), device) + exchange_s(work, device)


@dataclass(frozen=True)
class Estimate:
    """Time and price of a run on one kind of device."""

    device: str
    step_s: float
    samples_per_s: float
    """Samples of all workers per second."""
    hours: float
    usd_per_hour: float
    """Price of one device."""
    usd: float
    """Price of the run on all devices."""
    fits: bool | None
    """Whether the run fits the device's memory; None if unknown."""
    bound: str
    """The limit of a micro-step: products, memory, or launches."""


def estimate(
    config: RunConfig, work: StepWork, device: Device, usd_per_hour: float | None, needed_bytes: float | None
) -> Estimate:
    """Estimate a run on workers with one device each."""
    seconds = step_s(work, device)
    price, hours = device.usd_per_hour if usd_per_hour is None else usd_per_hour, config.steps * seconds / 3600
    fits = None if needed_bytes is None else needed_bytes <= device.memory_bytes
    usd, rate = hours * price * config.num_workers, config.global_batch / seconds
    return Estimate(device.name, seconds, rate, hours, price, usd, fits, _bound(work.micro_step, device))


def _bound(kernels: Sequence[Kernel], device: Device) -> str:
    if device.launch_s * len(kernels) >= kernels_s(kernels, device):
        return "launches"
    products = [one for one in kernels if one.flops]
    return "products" if 2 * kernels_s(products, device) >= kernels_s(kernels, device) else "memory"


def cost_table(estimates: Iterable[Estimate], config: RunConfig) -> list[str]:
    """Return the lines of the table with its assumptions."""
    fits = {True: "yes", False: "no", None: "unknown"}
    rows = [("GPU", "step", "samples/s", "the run", "USD/h", "USD", "fits", "limited by")]
    for one in estimates:
        times = (f"{format_number(1000 * one.step_s, digits=3)} ms", format_number(one.samples_per_s, digits=3))
        prices = (f"{one.usd_per_hour:.2f}", f"{one.usd:.2f}")
        rows.append((one.device, *times, format_seconds(3600 * one.hours), *prices, fits[one.fits], one.bound))
    return [
        f"{config.steps:,} steps on {plural(config.num_workers, 'GPU')}, estimated from counted kernels, not measured:",
        f"{PRODUCT_SHARE:.0%} of peak products, {TRAFFIC_SHARE:.0%} of memory bandwidth, {1e6 * LAUNCH_S:.0f} us per launch;",
        "without start-up, waiting for data, validation and checkpoints",
        *text_table(rows),
    ]


def cost_figures(estimates: Iterable[Estimate], work: StepWork) -> dict[str, Any]:
    """Return the values for `--json`."""
    return {
        "devices": [asdict(one) for one in estimates],
        "kernels": len(work.micro_step),
        "flops": sum(one.flops for one in work.micro_step),
        "bytes": sum(one.num_bytes for one in work.micro_step),
        "assumptions": {
            "product_share": PRODUCT_SHARE,
            "traffic_share": TRAFFIC_SHARE,
            "launch_s": LAUNCH_S,
            "shortest_kernel_s": SHORTEST_S,
        },
    }


# Counting with torch


def on_meta(module: Any) -> Any:
    """Return a copy of a module on the meta device, without copying its weights."""
    import torch

    def without_values(tensor: torch.Tensor) -> torch.Tensor:
        empty = torch.empty_like(tensor, device="meta")
        return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty

    memo = {id(one): without_values(one) for one in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, memo)


def count_kernels(module: Any, tensors: Mapping[str, Any], batch_size: int) -> list[Kernel]:
    """Return the kernels of a forward and backward pass of a module on the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    aten, kernels = torch.ops.aten, []
    gathers = {aten.embedding, aten.index, aten.index_select, aten.gather}

    class Fused(TorchFunctionMode):
        """Runs attention as one kernel, as on CUDA."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                return attention(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        shape = (*query.shape[:-1], key.shape[-2])
        key, value = (
            one.expand(*query.shape[:2], *one.shape[2:]) if one.shape[1] == 1 else one for one in (key, value)
        )
        bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(shape)
        call = aten._scaled_dot_product_efficient_attention
        return call(query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale)[0]

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            out = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
            known = {one.untyped_storage()._cdata for one in given}
            new = [one for one in out if one.untyped_storage()._cdata not in known]
            if not (new or func._schema.is_mutable) or func._overloadpacket in (aten.empty, aten.empty_like):
                return made  # a view
            packet = func._overloadpacket
            read = out if packet in gathers else given
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=made) if packet in flop_registry else 0
            is_half = bool(given) and given[0].dtype in (torch.bfloat16, torch.float16)
            kernels.append(Kernel(flops, sum(map(num_bytes, (*read, *(new or out)))), is_half))
            return made

    def num_bytes(tensor: Any) -> int:
        return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded tensor is read once

    batch = {key: rows_of(values, batch_size).to("meta") for key, values in tensors.items()}
    module.train()
    with Fused(), Counter():
        module(batch).loss.backward()
    module.zero_grad(set_to_none=True)
    return kernels
