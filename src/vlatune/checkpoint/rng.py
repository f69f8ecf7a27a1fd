"""The random generators of a rank (python, NumPy, torch, CUDA) as plain arrays, and back.

The order of samples and the noise of flow matching are pure functions of the seed and a place and need none of this;
dropout and whatever a policy draws by itself do. They are stored as one tensor per generator with a row per
rank.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from vlatune.files import real_path

RNG = "rng.safetensors"
Arrays = dict[str, np.ndarray]


def seed_all(seed: int) -> None:
    """All generators of this process begin anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_rng(device: torch.device) -> Arrays:
    """This process's generators; a reading of the CUDA one waits for nothing."""
    _, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state()
    assert kind == "MT19937"  # NumPy's legacy generator has no other
    found = {
        "python": np.array(words, dtype=np.uint32),
        "python_gauss": np.array([gauss is not None, gauss or 0.0], dtype=np.float64),
        "numpy": np.asarray(key, dtype=np.uint32),
        "numpy_gauss": np.array([position, has_gauss, cached], dtype=np.float64),
        "torch": torch.get_rng_state().numpy(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device).numpy()
    return found


def set_rng(states: Mapping[str, np.ndarray], device: torch.device) -> None:
    has_gauss, gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss if has_gauss else None))
    position, numpy_gauss, cached = states["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", states["numpy"], int(position), int(numpy_gauss), cached))
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(torch.from_numpy(states["cuda"].copy()), device)


def stack_rng(by_rank: Sequence[Arrays]) -> Arrays:
    """The states of all ranks -> one array per generator, its first axis the rank."""
    return {name: np.stack([states[name] for states in by_rank]) for name in by_rank[0]}


def load_rng(folder: Path, rank: int, num_workers: int) -> Arrays | None:
    """A rank's states; None when the checkpoint was made by another number of workers."""
    stored = load_file(real_path(folder, RNG))
    if len(stored["torch"]) != num_workers:
        return None
    return {name: value[rank] for name, value in stored.items()}
