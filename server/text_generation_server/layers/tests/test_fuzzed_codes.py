"""Quantized layers with random changes, and blocks of random bytes: what is read of them is multiplied as its numbers
are, so no code leads a kernel to other memory. `make fuzz-formats` tries 20,000 of each on every target.

python test_fuzzed_codes.py COUNT SEED
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from golden_layers import Case
from int_products import HALVES
from shard_tools import usable_kernels
from test_fuzz import mutant

from text_generation_common.cpu_features import NEEDS
from text_generation_common.errors import WeightsError
from text_generation_common.gguf.types import BY_NAME
from text_generation_common.quantized.tensors.blocks import read_blocks
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_common.quantized.tensors.splits import inputs_of, size_of
from text_generation_common.quantized.values import Dense, Weight
from text_generation_server.kernels.cpu import load_kernels
from text_generation_server.kernels.cpu.backend import CpuKernels
from text_generation_server.layers.linear import make_linear

LARGEST = 1e30  # products of larger numbers may be infinite, or not a number
ROUNDING = 1e-5  # largest error of a product, as a share of the sum of its terms' absolute values


def changed_layer(rng: random.Random) -> Weight | None:
    case: Case = mutant(rng)
    with suppress(WeightsError):
        if case.scheme() is not None:
            found: Weight = case.read()
            return found if len(exact_weight(found).shape) == 2 else None
    return None


def random_blocks(rng: random.Random) -> Weight | None:
    """Blocks of random bytes, or a rank's part of them, which may begin and end inside a block."""
    kind, outputs, blocks = rng.choice([*HALVES]), rng.randrange(1, 40), rng.randrange(1, 4)
    of = BY_NAME[kind]
    data = torch.frombuffer(bytearray(rng.randbytes(outputs * blocks * of.bytes)), dtype=torch.uint8)
    start, stop = sorted(rng.sample(range(0, blocks * of.block + 1, 8), 2))
    with suppress(WeightsError):
        return inputs_of(read_blocks(kind, data.view(outputs, -1), "l"), range(start, stop))
    return None


def check_product(kernels: CpuKernels, weight: Weight, rng: random.Random) -> None:
    exact = exact_weight(weight).double()
    x_type = rng.choice([torch.float32, torch.bfloat16])
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    x = torch.randn(rng.choice((1, 3, 5, 17)), size_of(weight)[1], generator=generator).to(x_type)
    linear = make_linear(kernels, weight, x_type=x_type, y_type=torch.float32)
    y, sizes = linear(x).double(), x.double().abs() @ exact.abs().T
    is_good = (y - x.double() @ exact.T).abs() <= ROUNDING * sizes + 1e-30
    assert bool((is_good | ~(sizes < LARGEST)).all()), weight


def values(rng: random.Random, count: int, make: Callable[[random.Random], Weight | None]) -> Iterator[Weight]:
    for _ in range(count):
        weight = make(rng)
        # Numbers without codes are multiplied in x's type.
        if weight is not None and not isinstance(weight, Dense):
            yield weight


def check(kernels: CpuKernels, count: int, seed: int) -> int:
    """How many were read and multiplied, of `count` layers and as many weights of blocks."""
    rng, multiplied = random.Random(seed), 0
    for make in (changed_layer, random_blocks):
        for weight in values(rng, count, make):
            check_product(kernels, weight, rng)
            multiplied += 1
    return multiplied


def test_what_is_read_of_changed_layers_is_multiplied_as_its_numbers() -> None:
    assert check(usable_kernels(), 150, seed=35) > 100


if __name__ == "__main__":
    torch.set_num_threads(1)
    count, seed = map(int, sys.argv[1:])
    for target in NEEDS:
        if (kernels := load_kernels(target)) is not None:
            print(f"{target}: {check(kernels, count, seed)} of {2 * count} were read and multiplied", flush=True)
