"""Makes the prompt of a chat: the template's text, the form of the answer, and the reader of the answer."""

import time
from collections.abc import Mapping
from dataclasses import replace

import orjson

from text_generation_router.api.common.messages import Calling
from text_generation_router.api.common.services import Services
from text_generation_router.api.openai import request as v1_request
from text_generation_router.api.openai.schemas import ChatOptions, ChatRequest, RenderedChat
from text_generation_router.errors import GrammarError, TemplateError, ToolError, ValidationError
from text_generation_router.http.caller import Caller
from text_generation_router.scheduling.request import Share
from text_generation_router.text.grammars.asked import AskedGrammar, GrammarKind
from text_generation_router.text.grammars.forms import CallsForm, ChatForm, ReasoningForm
from text_generation_router.text.grammars.tool_grammar import (
    NO_TOOL,
    GrammarCallReader,
    calls_schema,
    chosen_name,
    name_pattern,
)
from text_generation_router.text.tokens.pieces import Filtered, PieceReader, is_no_later_call, is_of_answer
from text_generation_router.text.validation import AskedParameters, Prompt


async def chat_prompt(services: Services, asked: ChatOptions, caller: Caller, names: Mapping[str, str]) -> Prompt:
    """The prompt of the chat. `names`: see `Prompt`. Raises InferenceError."""
    v1_request.check_request(asked, services)
    if asked.top_logprobs and not asked.logprobs and not services.style.is_tgis:
        raise ValidationError.of("top_logprobs", "is allowed only if `logprobs` is true")
    parameters = v1_request.parameters_of(asked, services, requested_tokens(asked), asked.top_logprobs)
    calling = asked.calling()
    if calling is not None and parameters.grammar is not None and services.style.is_tgis:
        raise ToolError("Grammar and tools are mutually exclusive")
    text = await rendered(services, asked, caller.share)
    # Chat templates write special tokens themselves, so the tokenizer adds none by default.
    prompt = Prompt(text, parameters, bool(asked.add_special_tokens), copies=asked.choices, names=names)
    if calling is not None and not calling.is_own(services.chat_formats.ways_in(services.style)):
        return await CallsByGrammar(services, asked, calling, caller).prompt(prompt)
    return divided(services, asked, calling, prompt)


def divided(services: Services, asked: ChatOptions, calling: Calling | None, prompt: Prompt) -> Prompt:
    """The prompt with a reader that divides the answer if calls or reasoning may be in it, and with the form of the
    whole text."""
    chat_formats = services.chat_formats
    reasons = not services.style.is_tgis and chat_formats.reading.reasoning is not None
    separates = reasons and asked.separate_reasoning is not False
    form = form_of(services, asked, calling, prompt)
    if form is not None:
        prompt = replace(prompt, parameters=replace(prompt.parameters, form=form))
    if calling is None and not separates:
        return prompt
    reading = chat_formats.reading if separates else chat_formats.reading_without_reasoning
    tools = None if calling is None else {name: schema or {} for name, schema in calling.schemas.items()}
    keeps_special = not prompt.parameters.skips_special
    markers = chat_formats.special_texts if reading.needs_special_tokens else frozenset[str]()

    def reader() -> PieceReader:
        found: PieceReader = reading.reader(tools, prompt.inputs, keeps_special)
        if calling is not None and not calling.is_parallel:
            found = Filtered(found, is_no_later_call)
        return Filtered(found, is_of_answer) if asked.include_reasoning is False else found

    return replace(prompt, parameters=replace(prompt.parameters, markers=markers), reader=reader)


def form_of(services: Services, asked: ChatOptions, calling: Calling | None, prompt: Prompt) -> ChatForm | None:
    """The form of the whole text, from reasoning to the end. None: only the answer's own form counts, if the answer has
    one."""
    chat_formats, tokenizer = services.chat_formats, services.tokenizer.tokenizer
    calls = None
    if calling is not None and (calling.is_required or calling.strict or prompt.parameters.grammar is not None):
        assert chat_formats.reading.calls is not None
        calls = CallsForm(
            chat_formats.reading.calls.name,
            calling.schemas,
            sorted(calling.strict),
            calling.is_required,
            calling.is_parallel,
        )
    format_ = None if services.style.is_tgis else chat_formats.reading.reasoning
    reasoning = None
    if format_ is not None and format_.begins and format_.ends:
        limit = asked.max_thinking_tokens
        if calls is not None or prompt.parameters.grammar is not None or limit is not None:
            is_open = format_.is_open_in(prompt.inputs)
            reasoning = ReasoningForm(format_.begins[0], format_.ends[0], is_open, limit)
    elif asked.max_thinking_tokens is not None:
        raise GrammarError("max_thinking_tokens", "the chat template shows no reasoning that could be limited")
    return ChatForm.of(tokenizer, reasoning, calls) if reasoning is not None or calls is not None else None


class CallsByGrammar:
    """Makes tool calls with a grammar, as TGI does, for a model whose own way to call tools is not known. If the model
    may also answer in words, it first chooses a function's name or no function; then the grammar makes the call, or a
    prompt without tools is answered."""

    def __init__(self, services: Services, asked: ChatOptions, calling: Calling, caller: Caller) -> None:
        self._services = services
        self._asked = asked
        self._calling = calling
        self._caller = caller

    async def prompt(self, prompt: Prompt) -> Prompt:
        """The prompt that makes the call or the answer. `prompt`: the prompt with the tools' descriptions."""
        names = [tool.function.name for tool in self._calling.tools]
        if not self._calling.is_required:
            name = await self._chosen(prompt, names)
            if name is None:
                text = await rendered_without_tools(self._services, self._asked, self._caller.share)
                return divided(self._services, self._asked, None, replace(prompt, inputs=text))
            names = [name]
        functions = [
            (tool.function.name, tool.function.parameters or {})
            for tool in self._calling.tools
            if tool.function.name in names
        ]
        schema = orjson.dumps(calls_schema(functions)).decode()
        is_loose = self._calling.strict.isdisjoint(names)
        grammar = AskedGrammar("tools", GrammarKind.JSON_SCHEMA, schema, is_loose=is_loose)
        parameters = replace(prompt.parameters, grammar=grammar, markers=frozenset())
        return replace(prompt, parameters=parameters, reader=GrammarCallReader)

    async def _chosen(self, prompt: Prompt, names: list[str]) -> str | None:
        """The name of the function that the model calls; None: the model calls no function."""
        pattern = AskedGrammar("tools", GrammarKind.REGEX, name_pattern([*names, NO_TOOL]))
        parameters = replace(
            _without_extras(prompt.parameters), grammar=pattern, max_new_tokens=None, ignore_eos_token=False
        )
        choosing = replace(prompt, parameters=parameters, copies=1)
        started_s = time.perf_counter()
        [result] = await self._services.inference.results([choosing], self._caller, started_s, is_answer=False)
        name = chosen_name(result.finish.generated_text)
        return name if name in names else None


def _without_extras(parameters: AskedParameters) -> AskedParameters:
    """The parameters for a text that only prepares the answer: without log-probabilities, stop strings and ids."""
    values = replace(parameters.sampling.values, top_n_tokens=0, min_new_tokens=0)
    sampling = replace(parameters.sampling, values=values)
    return replace(parameters, sampling=sampling, prompt_logprobs=None, stop=(), stop_token_ids=(), returns_ids=False)


async def rendered(services: Services, asked: ChatOptions, share: Share) -> str:
    """The prompt that the chat template makes. Raises TemplateError or OverloadedError."""
    if isinstance(asked, RenderedChat):
        return asked.prompt
    assert isinstance(asked, ChatRequest)
    if services.renderer is None:
        raise TemplateError("template not found", None)
    return await services.renderer.render(asked.conversation(services.chat_formats.ways_in(services.style)), share)


async def rendered_without_tools(services: Services, asked: ChatOptions, share: Share) -> str:
    """The prompt that the chat template makes of the request without its tools."""
    if isinstance(asked, RenderedChat):
        return asked.prompt_without_tools
    return await rendered(services, asked.without_tools(), share)


def requested_tokens(asked: ChatOptions) -> int | None:
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise ValidationError.of("max_tokens", "and `max_completion_tokens` mean the same, send one of them")
    return asked.max_tokens if asked.max_tokens is not None else asked.max_completion_tokens
