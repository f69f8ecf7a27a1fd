"""Explain why torch cannot use a GPU that the system has."""

import re
from dataclasses import dataclass
from pathlib import Path

DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the oldest driver that runs its programs."""


@dataclass(frozen=True)
class Gpu:
    """The first GPU as the driver and torch see it."""

    driver: str | None
    """Version of NVIDIA's driver; None if it is not loaded."""
    cuda: str | None
    """Version of CUDA that torch was built for; None for a build without CUDA."""
    is_usable: bool
    capability: tuple[int, int] | None = None
    """Compute capability, if usable."""
    architectures: tuple[str, ...] = ()
    """What torch's kernels were compiled for: `sm_90`, `compute_120`."""


def read_gpu() -> Gpu:
    import torch

    found = DRIVER.search(DRIVER_FILE.read_text()) if DRIVER_FILE.exists() else None
    driver, usable = found[1] if found else None, torch.cuda.is_available()
    if not usable:
        return Gpu(driver, torch.version.cuda or torch.version.hip, is_usable=False)
    capability = torch.cuda.get_device_capability() if torch.version.cuda else None
    return Gpu(driver, torch.version.cuda or torch.version.hip, True, capability, tuple(torch.cuda.get_arch_list()))


def find_problem(gpu: Gpu) -> str | None:
    """Return why torch cannot use the GPU and what to do; None if it can."""
    if gpu.cuda is None:
        return "torch is a build without CUDA; install a CUDA build of torch (https://pytorch.org/get-started)"
    major = int(gpu.cuda.split(".")[0])
    other = f"install a build of torch for a CUDA older than {major} (https://pytorch.org/get-started)"
    if not gpu.is_usable:
        driver = f"NVIDIA driver {gpu.driver}" if gpu.driver else "no NVIDIA driver is loaded"
        oldest = OLDEST_DRIVER.get(major)
        if gpu.driver and oldest and int(gpu.driver.split(".")[0]) < oldest:
            driver += f" is too old for CUDA {gpu.cuda}, which needs {oldest} or newer"
            return f"torch cannot use the GPU: {driver}; install driver {oldest} or newer, or {other}"
        return f"torch (CUDA {gpu.cuda}) cannot use the GPU: {driver}; check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    if gpu.capability and not any(_runs_on(one, gpu.capability) for one in gpu.architectures):
        name = f"{gpu.capability[0]}.{gpu.capability[1]}"
        return f"torch has no kernels for compute capability {name} (only {', '.join(gpu.architectures)}); {other}"
    return None


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """True if kernels compiled for an architecture run on a GPU."""
    kind, _, digits = architecture.partition("_")
    digits = digits.rstrip("af")  # variants of an architecture
    major, minor = int(digits[:-1]), int(digits[-1])
    if kind == "compute":  # is compiled for the GPU when it is first used
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]
