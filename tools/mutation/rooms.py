"""The rooms (parts of the packages) whose code is changed, and the tests that belong to each."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MutatedRoom:
    name: str
    sources: tuple[str, ...]  # glob patterns of paths, relative to the repository
    tests: tuple[str, ...]


SERVER = "server/text_generation_server"
ROUTER = "router/text_generation_router"
COMMON = "common/text_generation_common"
LAUNCHER = "launcher/text_generation_launcher"
# Folders in which each file must belong to a room, one of the groups of files that are tested together.
FRONTS = tuple(f"{ROUTER}/{room}" for room in ("wire", "fleet", "engine_service"))
WHOLE = (
    f"{ROUTER}/scheduling", f"{ROUTER}/engine", *FRONTS, f"{SERVER}/step", f"{SERVER}/sampling", LAUNCHER, COMMON,
)  # fmt: skip

ROOMS = (
    MutatedRoom(
        "scheduling",
        (f"{ROUTER}/scheduling/*.py", f"{ROUTER}/scheduling/memory/*.py"),
        (f"{ROUTER}/scheduling/tests/test_*.py", f"{ROUTER}/scheduling/memory/tests/test_*.py"),
    ),
    MutatedRoom(
        "engine",
        (f"{ROUTER}/engine/*.py", f"{ROUTER}/api/common/generation_stream.py"),
        (f"{ROUTER}/engine/tests/test_*.py", f"{ROUTER}/api/tests/test_generation_*.py"),
    ),
    MutatedRoom(
        "fronts and engines",
        tuple(f"{room}/*.py" for room in FRONTS),
        tuple(f"{room}/tests/test_*.py" for room in FRONTS),
    ),
    MutatedRoom("certificates", (f"{COMMON}/cluster/*.py",), (f"{COMMON}/cluster/tests/test_*.py",)),
    MutatedRoom(
        "worker",
        (
            f"{SERVER}/worker.py", f"{SERVER}/runner.py", f"{SERVER}/forward.py", f"{SERVER}/step/results.py",
            f"{SERVER}/step/warmup.py",
        ),
        (
            f"{SERVER}/step/tests/test_step_log.py", f"{SERVER}/tests/test_worker.py",
            f"{SERVER}/tests/test_servicer.py", f"{SERVER}/tests/test_runner.py",
            f"{SERVER}/tests/test_steps_in_flight.py", f"{SERVER}/device/tests/test_graphs.py",
        ),
    ),
    MutatedRoom(
        "batch and preparation",
        (
            f"{SERVER}/step/rows.py", f"{SERVER}/step/preparation.py", f"{SERVER}/step/layout.py",
            f"{SERVER}/step/inputs.py",
        ),
        (f"{SERVER}/step/tests/test_rows.py", f"{SERVER}/tests/test_runner.py"),
    ),
    MutatedRoom(
        "sampling",
        (
            f"{SERVER}/sampling/*.py", f"{SERVER}/step/parameters.py",
            f"{COMMON}/sampling*.py",
        ),
        (
            f"{COMMON}/tests/test_sampling.py", f"{SERVER}/tests/test_sampler.py",
            f"{SERVER}/tests/test_steps_in_flight.py", f"{SERVER}/tests/test_steps_on_a_gpu.py",
        ),
    ),
    MutatedRoom(
        "models and weights files",
        (f"{COMMON}/models/*.py", f"{COMMON}/models/families/*.py", f"{COMMON}/weights/*.py"),
        (
            f"{SERVER}/models/tests/test_config*.py", f"{SERVER}/models/tests/test_[flt]*.py",
            f"{SERVER}/weights/tests/test_weights_f*.py", f"{LAUNCHER}/tests/test_bad_starts.py",
        ),
    ),
    MutatedRoom(
        "quantized weights",
        (f"{COMMON}/quantized/*.py", f"{COMMON}/quantized/tensors/*.py"),
        (f"{COMMON}/quantized/tests/test_*.py",),
    ),
    MutatedRoom("GGUF", (f"{COMMON}/gguf/*.py",), (f"{COMMON}/gguf/tests/test_*.py",)),
    MutatedRoom("adapters", (f"{COMMON}/adapters/*.py",), (f"{COMMON}/adapters/tests/test_*.py",)),
    MutatedRoom("replicas on Ray", (f"{LAUNCHER}/ray/*.py",), (f"{LAUNCHER}/ray/tests/test_*.py",)),
    MutatedRoom(
        "launcher",
        (f"{LAUNCHER}/*.py", f"{COMMON}/[!s]*.py", f"{COMMON}/s[eh]*.py", f"{COMMON}/flags/*.py"),
        # All tests but test_hung_router.py, which waits for most of a minute.
        (
            f"{LAUNCHER}/tests/test_[!h]*.py", f"{LAUNCHER}/tests/test_hostile_places.py",
            f"{COMMON}/tests/test_[!s]*.py", f"{COMMON}/tests/test_service_types.py",
        ),
    ),
)  # fmt: skip


def files(root: Path, globs: tuple[str, ...]) -> list[str]:
    """The files below `root` that match the patterns, in the order of the patterns."""
    found = [str(path.relative_to(root)) for glob in globs for path in sorted(root.glob(glob))]
    return list(dict.fromkeys(name for name in found if not name.endswith("__init__.py")))
