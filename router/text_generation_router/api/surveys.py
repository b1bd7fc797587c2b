"""Looks through a body for fields that the schema lacks: refuses the unsupported ones, and names the unknown ones.

Each function returns the paths of the unknown fields, and raises a ValidationError for the first unsupported field.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from text_generation_router.api import known_fields
from text_generation_router.api.anthropic import fields as anthropic_fields
from text_generation_router.api.common.contract import MAX_NAME_CHARS, MAX_NAMES, Contract
from text_generation_router.api.responses import fields as responses_fields
from text_generation_router.api.responses.tools import is_left_out
from text_generation_router.errors import SuffixError

Value = dict[str, Any]


def survey(value: Value, contract: Contract, where: str = "") -> tuple[str, ...]:
    contract.refuse(value, where)
    if value.keys() <= contract.known:
        return ()
    return tuple(contract.unknown(value, where))


def survey_native(value: Value, contract: Contract) -> tuple[str, ...]:
    parameters = _object(value.get("parameters"))
    unknown = survey(value, contract)
    known_fields.PARAMETERS.refuse(parameters)  # as in TGI, errors name a parameter without its place
    return *unknown, *known_fields.PARAMETERS.unknown(parameters, "parameters.")


def survey_completion(value: Value, contract: Contract) -> tuple[str, ...]:
    """Also raises SuffixError, an error that TGI has."""
    if value.get("suffix") is not None:
        raise SuffixError
    return *survey(value, contract), *_stream_options(value)


def survey_chat(value: Value, contract: Contract) -> tuple[str, ...]:
    unknown = *survey(value, contract), *_stream_options(value), *_tools(value.get("tools"))
    for where, message in _objects(value.get("messages"), "messages"):
        known_fields.MESSAGE.refuse(message, where)
    return unknown


def survey_prompt(value: Value, contract: Contract) -> tuple[str, ...]:
    """Looks through a prompt of Anthropic's API."""
    unknown = [*survey(value, contract)]
    for where, tool in _objects(value.get("tools"), "tools"):
        if tool.get("type") in (None, "custom", "function"):  # a tool of another kind is refused by the schema
            unknown += survey(tool, anthropic_fields.TOOL, where)
    for name, of_part in (
        ("tool_choice", anthropic_fields.TOOL_CHOICE),
        ("thinking", anthropic_fields.THINKING),
        ("output_config", anthropic_fields.OUTPUT_CONFIG),
    ):
        unknown += survey(_object(value.get(name)), of_part, f"{name}.")
    return tuple([*unknown, *_turns(value)][:MAX_NAMES])


def survey_responses(value: Value, contract: Contract) -> tuple[str, ...]:
    unknown = [*survey(value, contract), *_stream_options(value)]
    unknown += survey(_object(value.get("text")), responses_fields.TEXT, "text.")
    unknown += survey(_object(value.get("reasoning")), responses_fields.REASONING, "reasoning.")
    unknown += _responses_tools(value.get("tools"), "tools")
    for where, item in _objects(value.get("input"), "input"):
        kind = item.get("type", "message")
        unknown += [where + kind] if kind == "web_search_call" else ()
        unknown += _of_kind(item, kind, responses_fields.ITEMS, where)
    return tuple(unknown[:MAX_NAMES])


def _responses_tools(tools: Any, place: str) -> list[str]:
    """The unknown fields of tools, and the tools that are left out."""
    unknown: list[str] = []
    for where, tool in _objects(tools, place):
        if is_left_out(tool):
            unknown.append(where + tool["type"][:MAX_NAME_CHARS])
        elif isinstance(kind := tool.get("type"), str):
            unknown += survey(tool, responses_fields.TOOLS[kind], where)
            unknown += _responses_tools(tool.get("tools"), f"{where}tools")
            if kind == "custom" and "definition" in _object(tool.get("format")):
                unknown.append(f"{where}format")
    return unknown


def _turns(value: Value) -> tuple[str, ...]:
    """The unknown fields of messages and of their blocks."""
    unknown = [*_blocks(value.get("system"), "system")]
    for where, turn in _objects(value.get("messages"), "messages"):
        unknown += survey(turn, anthropic_fields.TURN, where)
        for place, block in _objects(turn.get("content"), f"{where}content"):
            unknown += _block(block, place)
            unknown += _blocks(block.get("content"), f"{place}content")  # the blocks of a result
    return tuple(unknown[:MAX_NAMES])


def _blocks(blocks: Any, where: str) -> list[str]:
    return [path for place, block in _objects(blocks, where) for path in _block(block, place)]


def _block(block: Value, where: str) -> tuple[str, ...]:
    return _of_kind(block, block.get("type"), anthropic_fields.BLOCKS, where)


def _of_kind(value: Value, kind: Any, contracts: Mapping[str, Contract], where: str) -> tuple[str, ...]:
    """An object of another kind is refused by the schema."""
    contract = contracts.get(kind) if isinstance(kind, str) else None
    return () if contract is None else survey(value, contract, where)


def _objects(values: Any, where: str) -> Iterator[tuple[str, Value]]:
    """The objects of a list, each with its place."""
    for number, value in enumerate(values if isinstance(values, list) else ()):
        if isinstance(value, dict):
            yield f"{where}[{number}].", value


def _tools(tools: Any) -> Iterator[str]:
    for where, tool in _objects(tools, "tools"):
        yield from survey(tool, known_fields.TOOL, where)
        yield from survey(_object(tool.get("function")), known_fields.FUNCTION, f"{where}function.")


def _stream_options(value: Value) -> tuple[str, ...]:
    return survey(_object(value.get("stream_options")), known_fields.STREAM_OPTIONS, "stream_options.")


def _object(value: Any) -> Value:
    """The value, or an empty object if it is none: the schema refuses it."""
    return value if isinstance(value, dict) else {}
