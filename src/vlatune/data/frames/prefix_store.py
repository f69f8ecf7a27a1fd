"""Outputs of a policy's frozen part on the local disk, a part of the frame cache for each sample.

A sample's row holds one vector per token: of its images and, if the layout includes it, of its prompt.
Rows of short prompts are shorter. The name of a part covers everything that determines the row
except the prompt, whose digest is covered by the row's checksum: another prompt never matches.

    row of a sample, n tokens x width     | image tokens ......... | prompt, a multiple of 8 |
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from vlatune.batch import CAMERA_MASK, TOKEN_MASK, TOKENS, Columns
from vlatune.data.frames.cache import CacheSettings, PartSpec, open_cache, part_identity, room_bytes
from vlatune.data.read_spec import Unit
from vlatune.data.transforms import PROMPT_MULTIPLE

FIRST = np.zeros(1, np.int64)
"""The only row of a part."""


@dataclass(frozen=True)
class PrefixLayout:
    """Describes what is kept of a sample: the output of the policy's last frozen module before trainable ones."""

    part: str
    """Name of that module or output; two of them may have the same shape."""
    image_tokens: int
    max_prompt_tokens: int
    """0 if the prompt is not part of it."""
    width: int
    """Numbers per token."""
    dtype: str
    """float32 or bfloat16."""
    stored: str = "same"
    """`same` as computed, or `int8`: numbers, followed by a float32 scale for each group of them."""

    @property
    def group(self) -> int:
        """Return how many adjacent numbers of a token share a scale; heads of PI0.5 and SmolVLA are multiples of 64."""
        return math.gcd(self.width, 64)

    @property
    def column_dtype(self) -> np.dtype:
        """Dtype on the host; bfloat16 is stored as int16, because NumPy lacks it."""
        if self.stored == "int8":
            return np.dtype("u1")
        return np.dtype("<i2" if self.dtype == "bfloat16" else "<f4")

    @property
    def column_width(self) -> int:
        """Return the items of `column_dtype` per token."""
        return self.width + 4 * self.width // self.group if self.stored == "int8" else self.width

    @property
    def token_bytes(self) -> int:
        return self.column_width * self.column_dtype.itemsize

    @property
    def max_bytes(self) -> int:
        """Bytes of a row with the longest prompt."""
        return (self.image_tokens + self.max_prompt_tokens) * self.token_bytes

    def num_tokens(self, columns: Columns) -> np.ndarray:
        """Return the tokens of each row of a batch; `cut_prompts` rounds the longest prompt the same way."""
        if not self.max_prompt_tokens:
            return np.full(len(columns[TOKENS]), self.image_tokens)
        mask_BL = columns[TOKEN_MASK]
        used = np.where(mask_BL.any(axis=1), mask_BL.shape[1] - mask_BL[:, ::-1].argmax(axis=1), 1)
        rounded = -(-used // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
        return self.image_tokens + np.minimum(rounded, mask_BL.shape[1])


@dataclass(frozen=True)
class PrefixSettings:
    """Names the store of a run and what its rows contain; every worker receives it."""

    cache: CacheSettings
    layout: PrefixLayout
    identities: tuple[bytes, ...]
    """Digest for each dataset of everything but the prompt that determines its rows."""
    cameras: tuple[str, ...]
    """Columns with images, which are not read for samples with a kept row."""

    def on_device(self, *kernels: str | int) -> "PrefixSettings":
        """Return settings that only match rows computed by the same kernels."""
        return replace(self, identities=tuple(part_identity(one, *kernels) for one in self.identities))


@dataclass(frozen=True)
class PrefixKey:
    """Place of a sample's row, and what its checksum covers."""

    part: PartSpec
    tokens: int
    prompt: np.ndarray
    """Digest of the prompt, as the number that the frame cache stores with a row."""


class PrefixStore:
    """Rows on this node's disk; every operation is safe beside other processes and after a kill."""

    def __init__(self, settings: PrefixSettings) -> None:
        self.layout = settings.layout
        self._identities = settings.identities
        self._settings, self._cache = settings.cache, None
        with contextlib.suppress(OSError, ValueError):  # a folder that cannot be used on this node keeps nothing
            self._cache = open_cache(settings.cache)

    def keys(self, columns: Columns) -> Iterator[PrefixKey]:
        """Yield the key of each row of a batch."""
        places = (columns[name].tolist() for name in ("dataset_index", "episode_index", "frame_index"))
        for row, (tokens, *place) in enumerate(zip(self.layout.num_tokens(columns).tolist(), *places, strict=True)):
            digest = xxhash.xxh3_64()
            for name in (TOKENS, TOKEN_MASK)[: 2 if self.layout.max_prompt_tokens else 0]:
                digest.update(columns[name][row, : tokens - self.layout.image_tokens].tobytes())
            if CAMERA_MASK in columns:
                digest.update(columns[CAMERA_MASK][row].tobytes())
            part = PartSpec(self._identity(*place), 1, tokens * self.layout.token_bytes)
            # A float64 holds 53 bits of the digest exactly.
            yield PrefixKey(part, tokens, np.array([float(digest.intdigest() >> 11)]))

    def has(self, key: PrefixKey) -> bool:
        """True if a row exists; it may be damaged, or of another prompt."""
        return self._cache is not None and self._cache.has_first(key.part.identity)

    def has_sample(self, dataset: int, episode: int, frame: int) -> bool:
        """True if `has` is true for the key of a sample."""
        return self._cache is not None and self._cache.has_first(self._identity(dataset, episode, frame))

    def read(self, key: PrefixKey, out: np.ndarray) -> bool:
        """Fill contiguous memory of the row's size; return False if the row is missing or damaged."""
        return self._cache is not None and bool(self._cache.read(key.part, FIRST, key.prompt, out[None])[0])

    def write(self, key: PrefixKey, row: np.ndarray) -> None:
        """Store a row, if the budget has room for it."""
        if self._cache is not None:
            self._cache.write(key.part, FIRST, key.prompt, row[None])

    def room_bytes(self) -> int:
        """Return how many bytes the rows of this run may take."""
        return 0 if self._cache is None else room_bytes(self._settings)

    def split(self, unit: Unit) -> list[Unit]:
        """Split a unit by whether its images have to be read; images of kept rows do not."""
        place = unit.dataset_index, unit.episode_index
        kept = np.array([self.has_sample(*place, frame) for frame in unit.frames.tolist()])
        return [
            replace(unit, frames=unit.frames[rows], slots=unit.slots[rows], skips_images=skips)
            for rows, skips in ((~kept, False), (kept, True))
            if rows.any()
        ]

    def _identity(self, dataset: int, episode: int, frame: int) -> bytes:
        return part_identity("prefix", self._identities[dataset], episode, frame)


def total_bytes(layout: PrefixLayout, samples: int) -> int:
    """Return the bytes on disk of all rows of a run, if every prompt has the maximum length."""
    return samples * PartSpec(b"", 1, layout.max_bytes).disk_bytes
