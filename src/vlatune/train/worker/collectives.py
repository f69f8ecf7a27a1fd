"""Communication between workers, and consensus on saving or stopping after the same step.

A request may arise on any worker at any time (timer, signal, node removal), but all workers must
act on it after the same step. So every worker contributes its request to an asynchronous all-reduce
after every step, and acts on the result of the previous step, without waiting. It runs on the host,
over gloo. Gloo does not authenticate peers, so only plain values are exchanged, never pickles.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vlatune.feed.plan import Share
from vlatune.train.heartbeat import Request


class Consensus:
    def __init__(self, share: Share) -> None:
        self._share = share
        self._group = dist.new_group(backend="gloo") if share.num_workers > 1 else None
        self._largest = torch.tensor(int(Request.NOTHING))
        self._exchange: Any = None

    def take(self) -> Request:
        """Return the largest request that was given after the previous step."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
        return Request(int(self._largest))

    def give(self, request: Request) -> None:
        """Start the exchange for the next `take`; call both on all workers after every step."""
        self._largest = torch.tensor(int(request))
        if self._group is not None:
            self._exchange = dist.all_reduce(self._largest, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def gather(self, mine: Any) -> list[Any]:
        """Return every worker's value by rank; blocks. `packed` lists the supported types."""
        if self._group is None:
            return [mine]
        data = torch.frombuffer(bytearray(packed(mine)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._share.num_workers)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        parts = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
        mine_padded = torch.zeros_like(parts[0])
        mine_padded[: len(data)] = data
        dist.all_gather(parts, mine_padded, group=self._group)
        # No device sync: the gloo group gathers tensors in host memory.
        return [unpacked(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def packed(value: Any) -> bytes:
    """Serialise numbers, text, None, numeric arrays, lists and mappings without loss.

    Tuples become lists.
    """
    return json.dumps(_plain(value)).encode()


def unpacked(data: bytes) -> Any:
    return _restored(json.loads(data))


MAP, NUMBERS = "map", "numbers"
NUMBER_KINDS = "biuf"


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case np.generic():
            return value.item()  # a NumPy number, on the host
        case np.ndarray() if value.dtype.kind in NUMBER_KINDS:
            data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {NUMBERS: [value.dtype.str, value.shape, data]}
        case list() | tuple():
            return [_plain(one) for one in value]
        case Mapping():
            return {MAP: [[_plain(key), _plain(one)] for key, one in value.items()]}
    raise TypeError(f"{type(value).__name__}: only plain values and numeric arrays are sent to other workers")


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == MAP:
        return {_restored(key): _restored(one) for key, one in content}
    dtype = np.dtype(content[0])
    if kind != NUMBERS or dtype.kind not in NUMBER_KINDS:
        raise ValueError(
            f"another worker sent {kind} of {dtype}, expected numbers; another program may have joined the process group"
        )
    return np.frombuffer(bytearray(base64.b64decode(content[2])), dtype=dtype).reshape(content[1])


def mean_and_each(
    means: Tensor, mine: Sequence[float], share: Share, add_over_workers: Callable[[Tensor], object]
) -> tuple[list[float], list[list[float]]]:
    """Return `means` averaged over the workers, and every worker's `mine` by rank.

    Uses one collective and one transfer to the host per log step: the values of each worker travel
    in the same sum, in a table whose other rows are zero. `add_over_workers` sums in place.
    """
    table_WM = means.new_zeros(share.num_workers, len(mine))
    table_WM[share.rank] = means.new_tensor(mine)  # device sync
    values = torch.cat([means, table_WM.flatten()])
    if share.num_workers > 1:
        add_over_workers(values)
        values[: len(means)] /= share.num_workers
    plain = values.tolist()  # device sync: once per log line, whose numbers these are
    own = plain[len(means) :]
    return plain[: len(means)], [own[at : at + len(mine)] for at in range(0, len(own), len(mine))]
