"""Renders messages to one prompt with the model's chat template."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import jinja2

from text_generation_common.model_files import (
    MissingFileError,
    ModelFileError,
    find_json_object,
    read_model_file,
)
from text_generation_router.errors import StartError, TemplateError
from text_generation_router.text.template_cost import cost_of
from text_generation_router.text.template_environment import RaisedError, TemplateEnvironment

MAX_RENDERED_CHARS = 16_000_000
MAX_RENDER_S = 5.0
# Number of copied characters up to which a chat is cheap to render.
MAX_CHEAP_CHARS = 8_000_000
# Number of characters that a message takes in JSON besides its role and content.
MESSAGE_CHARS = 64


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str
    others: Mapping[str, Any] = field(default_factory=dict)  # other fields, which go to the template as they are


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template renders. `None`: the last message decides; if it is the assistant's it is continued, any other
    message is answered.
    """

    messages: tuple[Message, ...]
    add_generation_prompt: bool | None = None  # whether the prompt ends with the beginning of the assistant's answer
    continue_final_message: bool | None = None  # whether the prompt ends with the last message, to be continued
    variables: Mapping[str, Any] = field(default_factory=dict)  # more variables than every chat has

    @property
    def is_continued(self) -> bool:
        if self.continue_final_message is not None:
            return self.continue_final_message
        return self.add_generation_prompt is None and self.messages[-1].role == "assistant"

    @property
    def begins_an_answer(self) -> bool:
        """Whether the template is told to begin an answer. As in TGI it also is if the last message is continued and
        the request does not say otherwise; that beginning is then cut off."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def is_plain(self) -> bool:
        """Whether all that the template gets is texts, besides single numbers and truth values."""
        return not any(message.others for message in self.messages) and all(
            value is None or isinstance(value, int | float) for value in self.variables.values()
        )


class ChatTemplate:
    """A chat template. Unless it is cheap (see `is_cheap`), it may be rendered and compiled only in a process that can
    be killed: rendering may never end, nor may compiling, which evaluates constant expressions.
    """

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        """`tokens`: the model's bos_token and eos_token, if any. Raises StartError if `source` is not valid Jinja."""
        self.source, self.tokens = source, tokens
        with _refusing_syntax_errors():
            self._cost = cost_of(TemplateEnvironment().parse(source))

    def is_cheap(self, conversation: Conversation) -> bool:
        """Whether the template certainly renders the conversation within a few milliseconds, so that the router itself
        may render it. The bound on the cost holds for plain conversations only.
        """
        messages = conversation.messages
        if self._cost is None or not conversation.is_plain:
            return False
        chars = len(self.source) + sum(len(m.role) + len(m.content) + MESSAGE_CHARS for m in messages)
        return self._cost.of(len(messages), chars) <= MAX_CHEAP_CHARS

    def compile(self) -> jinja2.Template:
        """Compiles the template at the first call. Raises StartError for an unknown filter or test."""
        with _refusing_syntax_errors():
            return self._template

    @cached_property
    def _template(self) -> jinja2.Template:
        return TemplateEnvironment().from_string(self.source)

    def render(self, conversation: Conversation) -> str:
        """The prompt, up to the place where the assistant's answer begins or the last message goes on."""
        messages = conversation.messages
        variables = {
            **conversation.variables,
            **self.tokens,
            "messages": [{**message.others, "role": message.role, "content": message.content} for message in messages],
            "add_generation_prompt": conversation.begins_an_answer,
            "tools": None,
        }
        try:
            text = self._render(variables)
        except RaisedError as error:
            raise TemplateError(f"syntax error: {error} (in <string>:{_line(error.__traceback__)})") from error
        except Exception as error:  # a template is a program that may raise anything; the client gets the error
            reason = f"{type(error).__name__}: {error}"
            raise TemplateError(f"invalid operation: {reason} (in <string>:{_line(error.__traceback__)})") from error
        return _continued(text, messages[-1].content) if conversation.is_continued else text

    def _render(self, variables: Mapping[str, Any]) -> str:
        deadline, size, pieces = time.monotonic() + MAX_RENDER_S, 0, []
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                raise RaisedError(f"the prompt exceeds {MAX_RENDERED_CHARS} characters or {MAX_RENDER_S:.0f} s")
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


def _continued(text: str, content: str) -> str:
    """Cuts the prompt off after the content of the last message, so that the model continues it. Some templates strip
    that content.
    """
    for wanted in (content, content.strip()):
        at = text.rfind(wanted)
        if at >= 0:
            return text[: at + len(wanted)].rstrip()
    return text


def _line(traceback: TracebackType | None) -> int:
    """Number of the template's line that raised, from jinja2's traceback; 0 if unknown."""
    line = 0
    while traceback:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def load_chat_template(folder: Path, tokenizer_config_path: str | None = None) -> ChatTemplate | None:
    """The model's chat template, or None. It is taken from the first of these files that has one: chat_template.json,
    tokenizer_config.json, chat_template.jinja.

    `tokenizer_config_path` replaces all three. StartError for a file that cannot be used.
    """
    try:
        if tokenizer_config_path is not None:
            config = find_json_object(Path(tokenizer_config_path))
            if config is None:
                raise StartError(f"--tokenizer-config-path {tokenizer_config_path} is not a file: check the path")
            source = _template_of(config)
        else:
            config = find_json_object(folder / "tokenizer_config.json") or {}
            source = _model_template(folder, config)
    except ModelFileError as error:
        raise StartError(str(error)) from None
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _model_template(folder: Path, config: dict[str, Any]) -> str | None:
    """`config`: the content of the folder's tokenizer_config.json."""
    template = _template_of(find_json_object(folder / "chat_template.json") or {})
    return template or _template_of(config) or _jinja_file(folder / "chat_template.jinja")


def _template_of(config: dict[str, Any]) -> str | None:
    """The config's `chat_template`: a string, or the entry named `default` of a list of named templates."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _jinja_file(path: Path) -> str | None:
    try:
        return read_model_file(path).decode()
    except MissingFileError:
        return None
    except UnicodeDecodeError as error:
        raise StartError(f"{path} is not UTF-8 ({error}): repair it, or download it again") from None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens
