"""Explain why torch cannot use a GPU that the system has."""


def find_problem() -> str | None:
    """Return why torch cannot use the GPU and what to do; None if it can."""
    import torch

    cuda = torch.version.cuda or torch.version.hip
    if cuda is None:
        return "torch is a build without CUDA; install a CUDA build of torch (https://pytorch.org/get-started)"
    try:
        torch.cuda.init()  # names the driver's version if it is too old
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        return f"torch (CUDA {cuda}) cannot use the GPU: {reason}; check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    return None
