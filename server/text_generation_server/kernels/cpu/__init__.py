"""The CPU backend: plain C behind ctypes, compiled for the processor at hand when the package was installed."""

import torch

from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.library import Library, usable_targets


def load_kernels(target: str | None = None) -> CpuKernels | None:
    """The kernels for this processor, or for `target`; None where nothing that runs here was built. As many threads as
    torch has."""
    targets = usable_targets()
    if not targets or (target is not None and target not in targets):
        return None
    return CpuKernels(Library(target or targets[0]), torch.get_num_threads())
