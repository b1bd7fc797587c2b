"""The CPU backend: C functions called through ctypes, compiled for this machine's processor when the package was
installed.
"""

import torch

from text_generation_common.flags.kinds import ActivationType
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.kernels.cpu.library import Library, choose_target, why_not


def load_kernels(target: str | None = None, activations: ActivationType = ActivationType.model) -> CpuKernels | None:
    """The kernels for `target`, or the best kernels for this processor, with as many threads as torch has. None if no
    library that runs on this processor was built."""
    target = target or choose_target().target
    if target is None or why_not(target) is not None:
        return None
    return CpuKernels(Library(target), torch.get_num_threads(), activations)
