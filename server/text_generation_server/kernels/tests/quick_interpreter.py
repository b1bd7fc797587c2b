"""Makes Triton's interpreter faster, with the same results: it does once what it would do anew for each operation of a
kernel, and leaves out what has no effect."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """For this process, in which the interpreter is on."""
    from triton import language
    from triton._utils import validate_block_shape
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    # An operation on integers would be done again in 64 bits, to assert that none overflows: an assertion that does
    # nothing unless kernels are debugged.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)
    core.block_type.__init__ = _maker_of_types(core._unwrap_shape, cache(validate_block_shape))
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = _maker_of_tensors(core.constexpr)
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)
    # All functions of the language would be replaced anew for each call of a function of a kernel.
    interpreter._patch_attr = _binder(core.builtin(lambda: None).__code__, interpreter.interpreter_semantic)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": core}))
    never_restored = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda _: never_restored


def _numpy_types(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As `find`, which makes a table of all types for each call."""
    found: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if kind.is_block() else kind
        if element.name not in found:
            found[element.name] = find(element)
        return found[element.name]

    return numpy_type


def _maker_of_types(unwrap: Callable[[Any], Any], count: Callable[[Any], int]) -> Callable[[Any, Any, Any], None]:
    """As Triton's, without the name, which is made when it is read. `count` checks a shape, and counts its elements."""

    def make(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, list | tuple)
        self.element_ty, self.shape = element_ty, tuple(unwrap(shape))
        if not self.shape:
            raise TypeError("0d block_type is forbidden")
        self.numel = count(self.shape)

    return make


def _maker_of_tensors(constant: Callable[[int], Any]) -> Callable[[Any, Any, Any], None]:
    """As Triton's, with the same constants for all tensors of a shape."""

    @cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
        return constant(math.prod(shape)), tuple(map(constant, shape))

    def make(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(type.shape if type.is_block() else ())

    return make


def _broadcast(broadcast: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """As `broadcast`, which makes new tensors also if both have the same shape."""

    def as_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return as_one_shape


def _binder(checking: Any, semantic: Any) -> Callable[[Any, str, Any, Any, Any], None]:
    """Binds functions of the language to the interpreter. Wrappers of the code `checking` are left out: they only look
    whether a function is bound."""

    def bind(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is checking else member

        def bound(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(place, name, bound)

    return bind
