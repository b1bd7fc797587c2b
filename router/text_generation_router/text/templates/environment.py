"""The sandbox in which chat templates run: transformers' globals and filters, plus limits that transformers lacks.

A template comes with the model, so it is an untrusted program: it cannot reach attributes of Python's internals, change
the values it is given, or make huge strings and numbers.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_REPEATED = 1_000_000  # most characters or items that one multiplication may make
MAX_POWER_BITS = 4096


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training. The rendered text does not depend on
    it.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """The marked statements. As in transformers, variables that they set are forgotten after the end tag."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class RaisedError(TemplateError):
    """The template called raise_exception."""


class PublicNamespace(Namespace):
    """`namespace` of a template. As in transformers, it keeps no names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args  # not a named argument, so that `namespace(self=1)` works
        Namespace.__init__(self, {_public(name): value for name, value in dict(*values, **kwargs).items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_public(name), value)


def _public(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the template sets `{name}` in a namespace: names must not begin with an underscore")
    return name


class Dictionaries:
    """`dict` of a template: makes dictionaries, and is not a type whose attributes lead to Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class LazyGenerator(CodeGenerator):
    """Compiles a template without evaluating its constant expressions, which may stand in branches that are never
    taken."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))
    code_generator_class = LazyGenerator

    def __init__(self) -> None:
        extensions = [GenerationTag, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.filters["tojson"] = to_json
        self.globals["namespace"] = PublicNamespace
        self.globals["dict"] = Dictionaries()
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _refuse_if(len(value) * times > MAX_REPEATED)
        elif isinstance(left, int) and isinstance(right, int):
            _refuse_if(left.bit_length() * right > MAX_POWER_BITS)
        return super().call_binop(context, operator, left, right)


def _refuse_if(too_large: bool) -> None:
    if too_large:
        raise SecurityError("the template multiplies to a value that is too large")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter. Unlike jinja2's own filter, it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise RaisedError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
