"""Which features of a processor the CPU's kernels of each target need, and which this processor has."""

from pathlib import Path

# CPU flags that each target needs. /proc/cpuinfo lists a flag only if the operating system allows its instructions.
NEEDS = {
    "amx": {"amx_bf16", "amx_tile", "avx512_bf16", "avx512_fp16", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16", "avx512_vnni", "avx512bw", "avx512dq", "avx512vl"},
    "avx512": {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"},
    "avx2": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
    "portable": set[str](),
}


def processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())


def lacking(target: str, flags: set[str]) -> str | None:
    """The features that a processor with `flags` lacks for `target`, in words; None if it has all."""
    missing = NEEDS[target] - flags
    return f"this processor has no {', '.join(sorted(missing))}" if missing else None
