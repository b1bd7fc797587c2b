"""The product that gives logits on a GPU, with tensors of a GPU that torch only pretends to have."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from text_generation_server.kernels import triton as kernels
from text_generation_server.layers.linear import make_linear
from text_generation_server.layers.weights import dense


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_are_float32_without_a_second_pass(dtype: torch.dtype, has_bias: bool) -> None:
    with FakeTensorMode(), Operations() as operations:
        weight, x = (torch.empty(n, 64, dtype=dtype, device="cuda") for n in (320, 3))
        bias = torch.empty(320, dtype=dtype, device="cuda") if has_bias else None
        linear = make_linear(kernels, dense(weight), bias, dtype=torch.float32)  # type: ignore[arg-type]
        operations.names.clear()
        logits = linear(x)
    assert (logits.dtype, logits.shape, logits.stride()) == (torch.float32, (3, 320), (320, 1))
    assert operations.names == ["aten::mm.dtype", *["aten::add_.Tensor"] * has_bias]


def test_all_other_products_are_torch_s() -> None:
    with FakeTensorMode():
        half, whole = (torch.empty(32, 64, dtype=t, device="cuda") for t in (torch.bfloat16, torch.float32))
        assert kernels.linear(half, None, None, False, torch.bfloat16) is None
        scales = torch.empty(32, device="cuda")
        assert kernels.linear(half, None, scales, False, torch.float32) is None
        assert kernels.linear(half, None, None, True, torch.float32) is None
        assert kernels.linear(whole, None, None, False, torch.float32) is None
    assert kernels.linear(torch.empty(32, 64, dtype=torch.bfloat16), None, None, False, torch.float32) is None
