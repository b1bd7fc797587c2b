"""One fixture that yields every backend with each type of numbers in which it can be tested. A test that uses the
fixture runs on all of them. Triton's interpreter, which takes a hundred times as long as a GPU, gets fewer cases."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import pytest
import torch

from text_generation_common.cpu_features import NEEDS
from text_generation_server.kernels.interface import Kernels
from text_generation_server.kernels.tests.quick_interpreter import quicken

GPU = torch.cuda.is_available()


# Cases of a test, as patterns of their names, that only `make test-slow` gives to the interpreter. What they show of
# a Triton kernel, a case shows that stays: it is named before each, with the seconds of processor time that are saved.
SLOW_IF_INTERPRETED = {
    # A Triton kernel finds every token by the table: [3-scattered], in both types. A group is padded to a power of 2,
    # is one, or is 1: [3-scattered], [8-scattered] and [1-scattered] in float32. 22 s.
    "test_heads_of_the_usual_size_attend_over_tiles_and_splits": r"contiguous|-(4|7)-|float16-(1|8)-",
    # [group3-13rows] in both types; the groups 1, 4, 7 and 8 in float32. 4 s.
    "test_decode_attends_to_its_own_row_and_to_nothing_else": r"group3-3rows|float16-group[1478]-",
    # [group3-11rows] in both types; the groups 1, 4, 7 and 8 in float32. 2 s.
    "test_prefill_is_causal_over_prefix_and_chunk_whatever_else_is_in_the_step": r"group3-3rows|float16-group[1478]-",
    # 24 draws show no distribution: [combined-triton], which has every option, and comparisons with a plain computation
    # in test_every_option_alone_and_with_others_leaves_what_the_plain_computation_leaves. 10 s.
    "test_20_000_draws_follow_the_distribution": r"^(?!combined)",
    # [huge] is more than peaked, [quantised] is usual with ties, and [zeros of both signs] is equal and flat. 20 s.
    "test_cuts_of_rows_with_many_groups_keep_what_the_sorted_row_keeps": r"peaked|usual|flat|equal",
    # [70-40-triton]: a program of the Triton kernels has one row, however many there are. 6 s.
    "test_a_row_is_the_same_to_the_bit_whatever_the_other_rows_are": r"1030",
    # [all-3-64] in both types, which has every option; each option alone, and the size 80, which is padded, in float32;
    # the window in float16. 15 s.
    "test_options_change_the_scores_and_what_is_seen": r"float16-(softcap|slopes|sinks|all-1-80)|all-(8-128|4-256)",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items if not GPU else ():
        name, _, case = item.name.partition("[")
        if "triton" in case and (pattern := SLOW_IF_INTERPRETED.get(name)) and re.search(pattern, case):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    if not GPU and find_spec("triton") is not None:
        quicken()


@dataclass(frozen=True, slots=True)
class Subject:
    backend: str
    kernels: Kernels
    dtype: torch.dtype  # type of queries, and of keys and values unless a test chooses another
    device: torch.device

    @property
    def interpreted(self) -> bool:
        return self.backend == "triton" and not GPU


def load_reference() -> Kernels:
    return cast(Kernels, import_module("text_generation_server.kernels.reference"))


def load_triton() -> Kernels:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton")
    return cast(Kernels, import_module("text_generation_server.kernels.triton"))


def load_cpu(target: str) -> Kernels:
    kernels = import_module("text_generation_server.kernels.cpu").load_kernels(target)
    if kernels is None:
        needs = ", ".join(sorted(NEEDS[target])) or "nothing else"
        pytest.skip(f"these kernels need a C compiler when the package is installed, and of the processor: {needs}")
    return cast(Kernels, kernels)


CPU_TARGETS = {f"cpu_{target}": partial(load_cpu, target) for target in NEEDS}
LOADERS: dict[str, Callable[[], Kernels]] = {"reference": load_reference, "triton": load_triton} | CPU_TARGETS
# Triton's interpreter computes bfloat16 wrongly, without an error.
TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)
DTYPES = {"reference": (torch.float32, torch.bfloat16), "triton": TRITON_DTYPES}
DTYPES |= dict.fromkeys(CPU_TARGETS, (torch.float32, torch.bfloat16))
SUBJECTS = [(backend, dtype) for backend, dtypes in DTYPES.items() for dtype in dtypes]


@pytest.fixture(params=SUBJECTS, ids=[f"{backend}-{str(dtype)[6:]}" for backend, dtype in SUBJECTS])
def subject(request: pytest.FixtureRequest) -> Subject:
    backend, dtype = request.param
    device = torch.device("cuda" if GPU and backend == "triton" else "cpu")
    return Subject(backend, LOADERS[backend](), dtype, device)


@pytest.fixture
def ordered_products(subject: Subject) -> Iterator[None]:
    """Makes the interpreter's bits independent of a row's place. numpy's products depend on it on some processors."""
    if not subject.interpreted:
        yield
        return
    from text_generation_server.kernels.triton.interpreter import products_in_fixed_order

    with products_in_fixed_order():
        yield
