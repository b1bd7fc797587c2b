"""The demo model with weights, or keys and values, in 8 bits: it still adds numbers correctly, and takes the documented
memory."""

import re

import pytest
from demo_model.corpus import sum_question
from server_process import ServerProcess
from test_demo_model import assert_most_are_right
from test_launch import run_to_its_end

# Few tokens in a step make the warm-up shorter.
MEMORY = [
    *("--max-batch-total-tokens", "4096", "--max-batch-prefill-tokens", "256"),
    *("--max-concurrent-requests", "32"),
]


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "bfloat16", "--quantize", "int8", "--kv-cache-dtype", "fp8_e4m3fn"],
        pytest.param(["--dtype", "float32", "--kv-cache-dtype", "int8"], marks=pytest.mark.slow),
        pytest.param(["--dtype", "bfloat16", "--quantize", "int8"], marks=pytest.mark.slow),
        pytest.param(["--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3fn"], marks=pytest.mark.slow),
    ],
    ids=lambda flags: "-".join(flags[2:]),
)
def test_the_demo_model_still_adds(flags: list[str]) -> None:
    with ServerProcess(*flags, *MEMORY) as server:
        assert_most_are_right(server, sum_question, 30, 27)


def test_8_bit_keys_take_the_documented_memory() -> None:
    """A cache that does not fit is refused, and the error names the memory it needs. Each of 5 layers has 4 heads of 32
    numbers, for keys and for values; int8 adds a scale of 4 bytes for each head."""
    for flags, size in ((["--dtype", "float32"], 32 * 4), (["--kv-cache-dtype", "int8"], 32 + 4)):
        status, output = run_to_its_end(ServerProcess(*flags, "--max-batch-total-tokens", "1000000000"))
        found = re.search(r"needs (\d+) MiB of keys and values", output)
        assert status == 1 and found, output
        assert int(found.group(1)) == pytest.approx(1_000_000_000 * 5 * 2 * 4 * size / 2**20, rel=1e-3)
