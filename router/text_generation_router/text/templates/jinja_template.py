"""One Jinja template of a model: the sandbox in which it runs, what it reads, what it costs, and the text that it makes
of some variables.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from text_generation_router.errors import StartError, TemplateError
from text_generation_router.text.templates.cost import cost_of
from text_generation_router.text.templates.facts import facts_of

# The sandbox in which chat templates run: transformers' globals and filters, plus limits that transformers lacks.
#
# A template comes with the model, so it is an untrusted program: it cannot reach attributes of Python's internals,
# change the values it is given, or make huge strings and numbers.

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


class RaisedError(jinja2.TemplateError):
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


MAX_RENDERED_CHARS = 16_000_000
MAX_RENDER_S = 5.0


class JinjaTemplate:
    def __init__(self, source: str) -> None:
        """Raises StartError if `source` is not valid Jinja."""
        self.source = source
        with _refusing_syntax_errors():
            tree = TemplateEnvironment().parse(source)
        self.cost = cost_of(tree)
        self.facts = facts_of(tree)

    def compile(self) -> jinja2.Template:
        """Compiles the template at the first call. Raises StartError for an unknown filter or test."""
        with _refusing_syntax_errors():
            return self._template

    @cached_property
    def _template(self) -> jinja2.Template:
        return TemplateEnvironment().from_string(self.source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises TemplateError for whatever error the template raises: in its own words if it calls raise_exception,
        and otherwise with the number of its line."""
        try:
            return self._render(variables)
        except TemplateError:
            raise
        except RaisedError as error:
            raise TemplateError(f"the model's chat template refuses the conversation: {error}") from error
        except Exception as error:  # a template is a program that may raise anything; the client gets the error
            reason = f"{type(error).__name__}: {error}"
            raise TemplateError(
                f"invalid operation: {reason} (in <string>:{_line(error.__traceback__)})", None
            ) from error

    def _render(self, variables: Mapping[str, Any]) -> str:
        deadline, size, pieces = time.monotonic() + MAX_RENDER_S, 0, []
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                raise TemplateError(f"the prompt exceeds {MAX_RENDERED_CHARS} characters or {MAX_RENDER_S:.0f} s")
            pieces.append(piece)
        return "".join(pieces)


@contextmanager
def _refusing_syntax_errors() -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise StartError(
            f"the model's chat template is not valid Jinja: {error.message} (line {error.lineno}); "
            "give another one with --tokenizer-config-path"
        ) from error


def _line(traceback: TracebackType | None) -> int:
    """Number of the template's line that raised, from jinja2's traceback; 0 if unknown."""
    line = 0
    while traceback:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
