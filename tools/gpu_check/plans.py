"""The three plans: their stages in order, and how long each stage may take.

A plan is one call of at most LIMIT_S seconds. `a` asks whether the kernels run and how fast the server is, `b` whether
steps wait for the device, what mixed steps cost and which tiles are best, `c` whether all kernels compute the right
numbers, what others need for the same work, and where the time goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LIMIT_S = 540  # seconds that a plan may take: a lent GPU's calls end after 600, and starting takes some of them
STOP_S = 15  # seconds that a stage gets after SIGTERM to stop its server and end


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    function: str  # module:function of this package, with further arguments behind further colons
    limit_s: float  # a stage that takes longer is stopped
    reserved_s: float = 0  # seconds of the plan that stages before this one may not use
    computes: bool = True  # whether the stage runs kernels in its own process
    beside_others: bool = False  # whether it may share the GPU with its neighbours, because it measures no time


# The estimates below are of an H200 and Llama 8B: a decode step of 1, 64 and 256 rows takes 4.8, 8.4 and 21 ms, 4,096
# prompt tokens take 125 ms, the first compilation in a process 5.5 s and each further kernel 0.7 to 2.9 s, importing
# torch and making a CUDA context 8 s.
ENVIRONMENT = Stage("environment", "environment:describe", 30)
# Two products of 8192³ and 2 GiB moved some hundred times: 1 s, and the process's start.
CEILINGS = Stage("ceilings", "ceilings:measure", 40)
# 30 kernels are compiled (40 s) and run once, beside references of some tenths of a second.
SMOKE = Stage("smoke", "smoke:compare_all", 75)
# Six runners of two layers: 2 s each, most of it recording.
GRAPHS = Stage("graphs", "graphs:compare_replay", 60)
# Two servers: 35 s to start each (16 GB of random weights, compilation, 15 sizes recorded at 0.1 s), then loads: 3 + 8
# + 20 s of decoding, each after a quarter of it to warm up, 22 s of prompts (470,000 tokens), 8 s beside 64 streams.
SERVER = Stage("server", "server_run:measure", 220, reserved_s=200, computes=False)
# About 60 lines of 1 to 3 s: compiling a new width or cache, making up to 128 copies of inputs, 0.1 s of replays.
ROOFLINE = Stage("roofline", "roofline:measure", 240, reserved_s=60)
NO_SYNC = Stage("no-sync", "no_sync:watch_steps", 60)
# A runner of 32 layers with 300,000 slots (10 s), 40 steps of up to 0.3 s, and compiling.
MIXED = Stage("mixed", "mixed:measure", 90)
# For each of three caches: 90 tiles compiled by 16 cores (10 s, and as long to start their processes), then 54 × 3 and
# 36 × 3 pairs of a tile and a load, 0.1 s each.
TUNE = Stage("tune", "tune_tiles:tune_all", 200)
# One server, whose cache is bfloat16.
SERVER_AGAIN = Stage("server again", "server_run:measure_again", 140, reserved_s=110, computes=False)
# Eight parts of the table side by side: about 700 tests in all, 2 s each, most of it compiling with one core each.
PARTS = 8
MATRICES = tuple(
    Stage(f"matrices {part}", f"matrices:run_part:{part}:{PARTS}", 270, beside_others=True) for part in range(PARTS)
)
# memcheck slows a program 10 to 50 times.
SANITIZER = Stage("sanitizer", "sanitizer:examine", 75, reserved_s=60, computes=False)
# Eight layers compiled by inductor for two batches (25 s each); then transformers, if time is left.
PEERS = Stage("peers", "peers:measure", 150, reserved_s=75)
# A runner of 32 layers, and three profiles of three steps.
PROFILE = Stage("profile", "profile_steps:measure", 60, reserved_s=45)

PLANS: dict[str, tuple[Stage, ...]] = {
    "a": (ENVIRONMENT, CEILINGS, SMOKE, GRAPHS, SERVER, ROOFLINE),
    "b": (ENVIRONMENT, CEILINGS, NO_SYNC, MIXED, TUNE, SERVER_AGAIN),
    "c": (ENVIRONMENT, CEILINGS, *MATRICES, SANITIZER, PROFILE, PEERS),
}


def time_for(stage: Stage, behind: Sequence[Stage], left_s: float) -> float:
    """Seconds that `stage` may take when `left_s` seconds of the plan are left: less what is reserved for the stages
    behind it, and the time to stop it. 0 or less if it cannot run."""
    return min(stage.limit_s, left_s - STOP_S - sum(other.reserved_s for other in behind))


def rounds(stages: Sequence[Stage], beside: int) -> list[list[Stage]]:
    """Stages to run at the same time: up to `beside` neighbours that measure no time, or one stage that does."""
    together: list[list[Stage]] = []
    for stage in stages:
        last = together[-1] if together else []
        if last and stage.beside_others and last[-1].beside_others and len(last) < beside:
            last.append(stage)
        else:
            together.append([stage])
    return together
