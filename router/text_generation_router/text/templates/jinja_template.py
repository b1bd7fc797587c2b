"""One Jinja template of a model: what it reads, what it costs, and the text that it makes of some variables."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any

import jinja2

from text_generation_router.errors import StartError, TemplateError
from text_generation_router.text.templates.cost import cost_of
from text_generation_router.text.templates.environment import RaisedError, TemplateEnvironment
from text_generation_router.text.templates.facts import facts_of

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
