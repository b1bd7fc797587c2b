"""A GPU that is not there: tensors that torch takes for tensors of a GPU, and a record of what would wait for the GPU.

The numbers of such a tensor lie in a tensor of the CPU, on which torch's operations run. So one sees which operations
a step asks for, on which devices, with which arguments, and how torch would have carried them out: what is recorded as
a wait is an operation after which the host goes on only when the GPU has done all its work."""

import ctypes
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import text_generation_server

SERVER, TESTS = str(Path(text_generation_server.__file__).parent), "/tests/"
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
CUDA, META = 1, 14  # c10::DeviceType
aten = torch.ops.aten
# Operations whose result has a number for Python, or a shape, that depends on numbers of their inputs.
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
COPIES = {aten._to_copy, aten.copy_, aten.copy}
LOOKUPS = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
UNSET = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


class GpuTensor(Tensor):
    numbers: Tensor  # on the CPU

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "GpuTensor":
        made: GpuTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.shape, strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype,
            device=GPU,
        )  # fmt: skip
        made.numbers = numbers
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the fake GPU, which is not active")

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()


class FakeGpu(TorchDispatchMode):
    """While active, torch computes on GpuTensors. `waits` has a line for each kind of wait inside of `launching`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: dict[str, None] = {}  # in the order in which they were met
        self.launched = 0  # number of kernels
        self._is_launching = False
        self._pinned: dict[int, Tensor] = {}  # by the address of their memory; kept, so that no address is used twice

    @contextmanager
    def launching(self) -> Iterator[None]:
        self._is_launching = True
        try:
            yield
        finally:
            self._is_launching = False

    def note_wait(self, what: str) -> None:
        if self._is_launching:
            lines = [f for f in traceback.extract_stack() if f.filename.startswith(SERVER) and TESTS not in f.filename]
            where = f"{Path(lines[-1].filename).name}: {lines[-1].line}" if lines else "no line of the server"
            self.waits[f"{what} ({where})"] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        ours = [x for x in given if isinstance(x, GpuTensor)]
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if (ours or target == GPU.type) and (reason := self._wait(func, args, kwargs, given)):
            self.note_wait(f"{func.name()} {reason}")
        if target:
            kwargs["device"] = CPU
        pins = kwargs.pop("pin_memory", None)
        bare_args, bare_kwargs = tree_map_only(GpuTensor, lambda x: x.numbers, (args, kwargs))
        result = func(*bare_args, **bare_kwargs)
        if func.overloadpacket in UNSET:
            result.zero_()
        if pins:
            self._pinned[result.untyped_storage().data_ptr()] = result
        if func.overloadpacket is aten.copy_:
            return args[0]
        if target == CPU.type or not (ours or target):
            return result
        same = {id(x.numbers): x for x in ours}
        return tree_map_only(Tensor, lambda x: same[id(x)] if id(x) in same else GpuTensor(x), result)

    def _wait(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> str | None:
        """Why this operation waits for the GPU, or None if it does not."""
        packet = func.overloadpacket
        if packet in COPIES:
            return self._copy_waits(packet, args, kwargs)
        if packet in LOOKUPS:
            parts = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
            if any(x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]) if isinstance(x, Tensor)):
                return "counts the true elements of a mask"
            return "has a tensor of the host" if any(not isinstance(x, GpuTensor) for x in parts) else None
        if READS & set(func.tags):
            return "reads numbers"
        if any(not isinstance(x, GpuTensor) and x.dim() for x in given):
            return "has a tensor of the host"
        return None

    def _copy_waits(self, packet: Any, args: Any, kwargs: Any) -> str | None:
        if packet is aten._to_copy:
            source, asynchronous = args[0], kwargs.get("non_blocking", False)
            device = kwargs.get("device")
            if device is None or torch.device(device).type == source.device.type:
                return None
            # To the host, torch makes the memory, and does not pin it.
            host = None if isinstance(source, GpuTensor) else source
        else:
            target, source = args[0], args[1]
            asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if isinstance(target, GpuTensor) == isinstance(source, GpuTensor):
                return None
            host = source if isinstance(target, GpuTensor) else target
        if host is None or host.untyped_storage().data_ptr() not in self._pinned:
            return "copies between devices, with memory that is not pinned"
        return None if asynchronous else "copies between devices, and not asynchronously"


class AwaitedMoment:
    """A moment that has come when the host asks. To ask is a wait. The GPU is not idle meanwhile if it has kernels that
    were launched behind the moment."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._launched = gpu.launched

    def has_come(self) -> bool:
        return True

    def wait(self) -> None:
        behind = "" if self._gpu.launched == self._launched else ", with kernels launched behind it,"
        self._gpu.note_wait(f"a moment{behind} is awaited")

    def ns_since(self, earlier: "AwaitedMoment") -> int:
        return 0


def pretend() -> None:
    """Makes torch believe in GPU 0, for the rest of the process."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda.get_device_name = lambda device=None: "a fake GPU"
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    # torch asks the guard of a tensor's kind of device to choose the device. torch for CPUs has no guard for CUDA, and
    # gets the guard of meta tensors, which does nothing.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[CUDA] = guards[META]
