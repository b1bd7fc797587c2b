"""One fixture that yields every backend with each type of numbers in which it can be tested. A test that uses the
fixture runs on all of them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import pytest
import torch

from text_generation_common.cpu_features import NEEDS
from text_generation_server.kernels.interface import Kernels

GPU = torch.cuda.is_available()


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
