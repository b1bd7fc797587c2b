"""The few operations that a model is made of, behind one interface. `reference` defines the right results.

A backend has the functions of `interface.Kernels`: a module (`reference`, `triton`) or an object (`cpu`). Models and
sampler receive a backend and never ask which backend it is.
Shapes: T tokens of a step, R rows, H query heads, G key/value heads, D head size, S slots, V vocabulary, L positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from text_generation_common.flags.kinds import ActivationType
from text_generation_server.errors import OptionError
from text_generation_server.kernels.interface import Kernels


@dataclass(frozen=True, slots=True)
class Backend:
    name: str
    kernels: Kernels
    wake: Callable[[], None] = lambda: None  # wakes idle threads, because kernels will be called soon
    end_threads: Callable[[], None] = lambda: None  # before a fork; the next call starts others
    limit_threads: Callable[[int], None] = lambda most: None  # in this process, from now on


def select_backend(
    device: torch.device, cpu_target: str | None = None, activations: ActivationType = ActivationType.model
) -> Backend:
    """The kernels for a device: Triton on GPUs, compiled C on CPUs, torch where no C library is usable. The name says
    why no better kernels were taken.

    On CPUs, `cpu_target` asks for the library of one target, and `activations` for what x of quantized weights becomes.
    OptionError if this machine cannot use them."""
    from text_generation_server.kernels import reference

    if device.type == "cuda":
        from text_generation_server.kernels import triton

        return Backend("triton", cast(Kernels, triton))
    from text_generation_server.kernels.cpu import load_kernels
    from text_generation_server.kernels.cpu.library import choose_target, require_target

    choice = choose_target() if cpu_target is None else require_target(cpu_target)
    compiled = load_kernels(choice.target, activations)
    if compiled is None:
        if activations is not ActivationType.model:
            raise OptionError(f"--activations {activations} needs the compiled kernels; {choice.reason}")
        return Backend(f"torch's, since {choice.reason}", cast(Kernels, reference))
    better = f"; not {choice.better}, since {choice.reason}" if choice.better else ""
    library = compiled.library
    return Backend(f"{compiled.name}{better}", compiled, library.wake, library.end_team, library.limit_threads)
