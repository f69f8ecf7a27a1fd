"""A short hash that tells one base model's weights from another's, without reading all of them."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from vlatune.files import open_file

SAMPLED_BYTES = 4096
"""Of the beginning of each tensor: two models of one shape differ there in every tensor that was trained apart."""
MAX_HEADER_BYTES = 100_000_000


def base_weights(folder: Path) -> str:
    """Names, shapes and places of all tensors, and the first bytes of each."""
    return short_hash(part for path in sorted(folder.glob("model*.safetensors")) for part in _parts(path))


def short_hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _parts(path: Path) -> Iterator[bytes]:
    with open_file(path.parent, path.name) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, MAX_HEADER_BYTES))
        yield header
        try:
            offsets = [one["data_offsets"] for name, one in json.loads(header).items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"policy '{path.parent}': {path.name} is damaged (no header); fetch the base model anew"
            ) from None
        yield from _tensor_starts(file, 8 + length, offsets)


def _tensor_starts(file: IO[bytes], data_begin: int, offsets: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    for begin, end in offsets:
        file.seek(data_begin + begin)
        yield file.read(min(end - begin, SAMPLED_BYTES))
