"""The virtual device in this process: `load(build(folder))`, then `torch.device("virtual", 0)`.

Only for processes of their own: a loaded device cannot be unloaded, and torch has one accelerator per process.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "virtual"


def build(folder: Path) -> Path:
    """Compile the device for this torch into the folder, if it is not there; raises FileNotFoundError without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("g++ is needed to build the virtual device")
    out = folder / f"virtual_device-{torch.__version__}.so"
    if not out.exists() or out.stat().st_mtime < SOURCE.stat().st_mtime:
        home = Path(torch.__file__).parent
        words = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{home / 'include'}", f"-L{home / 'lib'}"]
        words += [f"-I{home / 'include/torch/csrc/api/include'}", f"-Wl,-rpath,{home / 'lib'}"]
        partial = out.with_suffix(f".{os.getpid()}")
        words += [str(SOURCE), "-o", str(partial), "-lc10", "-ltorch_cpu"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"g++ failed:\n{done.stderr[-4000:]}")
        partial.rename(out)
    return out


class VirtualDevice:
    """Controls and reports of the device."""

    def __init__(self, library: Path) -> None:
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, _make_module())
        torch.ops.load_library(library)
        self._library = ctypes.CDLL(str(library))
        for name in ("vd_violations", "vd_host_syncs"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.vd_forbid_syncs.restype = ctypes.c_void_p
        self._library.vd_allow_syncs.argtypes = [ctypes.c_void_p]
        self._library.vd_set_cap.argtypes = [ctypes.c_int, ctypes.c_uint64]

    @property
    def violations(self) -> list[str]:
        return self._library.vd_violations().decode().splitlines()

    @property
    def host_syncs(self) -> dict[str, int]:
        """Return operation -> how many times it made the host wait."""
        lines = [line.split(" ", 1) for line in self._library.vd_host_syncs().decode().splitlines()]
        return {name: int(count) for count, name in lines}

    def clear(self) -> None:
        self._library.vd_clear()

    def set_cap(self, num_bytes: int, index: int = 0) -> None:
        self._library.vd_set_cap(index, num_bytes)

    @contextmanager
    def no_host_syncs(self) -> Iterator[None]:
        """Raise at a host synchronisation of this thread or of its backward passes."""
        guard = self._library.vd_forbid_syncs()
        try:
            yield
        finally:
            self._library.vd_allow_syncs(guard)

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Do not count or forbid host synchronisations of this thread."""
        self._library.vd_unobserved(1)
        try:
            yield
        finally:
            self._library.vd_unobserved(-1)


def _make_module() -> ModuleType:
    """Return what torch expects as `torch.virtual`; random numbers come from the CPU's generator."""
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 2
    module.get_device_name = lambda device=None: NAME
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
