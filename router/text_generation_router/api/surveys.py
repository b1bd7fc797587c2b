"""Looks through a body for fields that the schema lacks: refuses the unsupported ones, and names the unknown ones.

Each function returns the paths of the unknown fields, and raises a ValidationError for the first unsupported field.
"""

from collections.abc import Iterator
from typing import Any

from text_generation_router.api import anthropic_fields, known_fields, responses_fields
from text_generation_router.api.contract import MAX_NAME_CHARS, MAX_NAMES, Contract
from text_generation_router.api.responses_tools import is_left_out
from text_generation_router.errors import SuffixError

Value = dict[str, Any]


def survey_generate(value: Value) -> tuple[str, ...]:
    return _native(value, known_fields.GENERATE)


def survey_compat(value: Value) -> tuple[str, ...]:
    return _native(value, known_fields.COMPAT_GENERATE)


def _native(value: Value, contract: Contract) -> tuple[str, ...]:
    parameters = _object(value.get("parameters"))
    unknown = _survey(value, contract)
    known_fields.PARAMETERS.refuse(parameters)  # as in TGI, errors name a parameter without its place
    return *unknown, *known_fields.PARAMETERS.unknown(parameters, "parameters.")


def survey_tokenize(value: Value) -> tuple[str, ...]:
    """`parameters` have no effect on tokenizing, whatever fields they have."""
    return _survey(value, known_fields.TOKENIZE)


def survey_detokenize(value: Value) -> tuple[str, ...]:
    return _survey(value, known_fields.DETOKENIZE)


def survey_completion(value: Value) -> tuple[str, ...]:
    """Also raises SuffixError, an error that TGI has."""
    if value.get("suffix") is not None:
        raise SuffixError
    return *_survey(value, known_fields.COMPLETION), *_stream_options(value)


def survey_chat(value: Value) -> tuple[str, ...]:
    unknown = *_survey(value, known_fields.CHAT), *_stream_options(value), *_tools(value.get("tools"))
    messages = value.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and not message.keys() <= known_fields.MESSAGE.honoured:
            known_fields.MESSAGE.refuse(message, f"messages[{number}].")
    return unknown


def survey_messages(value: Value) -> tuple[str, ...]:
    return _prompt(value, anthropic_fields.MESSAGES)


def survey_count_tokens(value: Value) -> tuple[str, ...]:
    return _prompt(value, anthropic_fields.COUNT_TOKENS)


def _prompt(value: Value, contract: Contract) -> tuple[str, ...]:
    unknown = [*_survey(value, contract), *_listed_tools(value, anthropic_fields.TOOL)]
    for name, of_part in (
        ("tool_choice", anthropic_fields.TOOL_CHOICE),
        ("thinking", anthropic_fields.THINKING),
        ("output_config", anthropic_fields.OUTPUT_CONFIG),
    ):
        unknown += _survey(_object(value.get(name)), of_part, f"{name}.")
    return tuple([*unknown, *_turns(value)][:MAX_NAMES])


def _listed_tools(value: Value, contract: Contract) -> list[str]:
    """The unknown fields of tools. A tool of another kind is refused by the schema."""
    return [
        path
        for where, tool in _objects(value.get("tools"), "tools")
        if tool.get("type") in (None, "custom", "function")
        for path in _survey(tool, contract, where)
    ]


def survey_responses(value: Value) -> tuple[str, ...]:
    unknown = [*_survey(value, responses_fields.RESPONSES), *_stream_options(value)]
    unknown += _survey(_object(value.get("text")), responses_fields.TEXT, "text.")
    unknown += _survey(_object(value.get("reasoning")), responses_fields.REASONING, "reasoning.")
    unknown += _responses_tools(value.get("tools"), "tools")
    for where, item in _objects(value.get("input"), "input"):
        kind = item.get("type", "message")
        unknown += [where + kind] if kind == "web_search_call" else ()
        contract = responses_fields.ITEMS.get(kind) if isinstance(kind, str) else None
        unknown += () if contract is None else _survey(item, contract, where)
    return tuple(unknown[:MAX_NAMES])


def _responses_tools(tools: Any, place: str) -> list[str]:
    """The unknown fields of tools, and the tools that are left out."""
    unknown: list[str] = []
    for where, tool in _objects(tools, place):
        if is_left_out(tool):
            unknown.append(where + tool["type"][:MAX_NAME_CHARS])
        elif isinstance(kind := tool.get("type"), str):
            unknown += _survey(tool, responses_fields.TOOLS[kind], where)
            unknown += _responses_tools(tool.get("tools"), f"{where}tools")
            if kind == "custom" and "definition" in _object(tool.get("format")):
                unknown.append(f"{where}format")
    return unknown


def _turns(value: Value) -> tuple[str, ...]:
    """The unknown fields of messages and of their blocks."""
    unknown = [*_blocks(value.get("system"), "system")]
    for where, turn in _objects(value.get("messages"), "messages"):
        unknown += _survey(turn, anthropic_fields.TURN, where)
        for place, block in _objects(turn.get("content"), f"{where}content"):
            unknown += _block(block, place)
            unknown += _blocks(block.get("content"), f"{place}content")  # the blocks of a result
    return tuple(unknown[:MAX_NAMES])


def _blocks(blocks: Any, where: str) -> list[str]:
    return [path for place, block in _objects(blocks, where) for path in _block(block, place)]


def _block(block: Value, where: str) -> tuple[str, ...]:
    """A block of another kind is refused by the schema."""
    kind = block.get("type")
    contract = anthropic_fields.BLOCKS.get(kind) if isinstance(kind, str) else None
    return () if contract is None else _survey(block, contract, where)


def _objects(values: Any, where: str) -> Iterator[tuple[str, Value]]:
    """The objects of a list, each with its place."""
    for number, value in enumerate(values if isinstance(values, list) else ()):
        if isinstance(value, dict):
            yield f"{where}[{number}].", value


def _tools(tools: Any) -> Iterator[str]:
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        where = f"tools[{number}]."
        yield from _survey(_object(tool), known_fields.TOOL, where)
        function = _object(_object(tool).get("function"))
        yield from _survey(function, known_fields.FUNCTION, f"{where}function.")


def _survey(value: Value, contract: Contract, where: str = "") -> tuple[str, ...]:
    contract.refuse(value, where)
    if value.keys() <= contract.known:
        return ()
    return tuple(contract.unknown(value, where))


def _stream_options(value: Value) -> tuple[str, ...]:
    return _survey(_object(value.get("stream_options")), known_fields.STREAM_OPTIONS, "stream_options.")


def _object(value: Any) -> Value:
    """The value, or an empty object if it is none: the schema refuses it."""
    return value if isinstance(value, dict) else {}
