"""The stages in their order, and the main function of a stage's process.

python -m gpu_check.stages NAME FINDINGS_FILE FIGURES
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from gpu_check.findings import Context, Finding, append
from text_generation_benchmark.process import exit_on_sigterm

PACKAGE = "gpu_check"


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    function: str  # module:function, relative to this package
    limit_s: float
    computes: bool = True  # whether the stage runs kernels in its own process
    beside_others: bool = False  # whether it may share the GPU with other stages, because it measures no time


STAGES = (
    Stage("environment", "environment:describe", 60),
    Stage("ceilings", "ceilings:measure", 60),
    Stage("attention in float16", "attention:in_float16", 150, beside_others=True),
    Stage("attention in bfloat16", "attention:in_bfloat16", 150, beside_others=True),
    Stage("attention over 8 bits in float16", "attention:over_8_bits_in_float16", 150, beside_others=True),
    Stage("attention over 8 bits in bfloat16", "attention:over_8_bits_in_bfloat16", 150, beside_others=True),
    Stage("slots beyond 2^31", "attention:beyond_31_bits", 90, beside_others=True),
    Stage("other kernels", "elementwise:compare_all", 150, beside_others=True),
    Stage("sampling", "sampling:compare_all", 150, beside_others=True),
    Stage("determinism", "determinism:compare_all", 150, beside_others=True),
    Stage("graphs", "graphs:compare_replay", 120),
    Stage("roofline", "roofline:measure", 150),
    Stage("server", "server_run:measure", 240, computes=False),
)


def function_of(stage: Stage) -> Callable[[Context], Iterator[Finding]]:
    module, _, name = stage.function.partition(":")
    function: Callable[[Context], Iterator[Finding]] = getattr(import_module(f"{PACKAGE}.{module}"), name)
    return function


def main() -> None:
    name, path, figures = sys.argv[1:]
    exit_on_sigterm()
    stage = next(stage for stage in STAGES if stage.name == name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with torch.inference_mode():
        for finding in function_of(stage)(Context(device, json.loads(figures))):
            append(Path(path), finding)


if __name__ == "__main__":
    main()
