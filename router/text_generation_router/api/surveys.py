"""Looks through a body for fields that the schema lacks: refuses the unsupported ones, and names the unknown ones.

Each function returns the paths of the unknown fields, and raises a ValidationError for the first unsupported field.
"""

from typing import Any

from text_generation_router.api import known_fields
from text_generation_router.api.contract import Contract
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
    unknown = *_survey(value, known_fields.CHAT), *_stream_options(value)
    messages = value.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and not message.keys() <= known_fields.MESSAGE.honoured:
            known_fields.MESSAGE.refuse(message, f"messages[{number}].")
    return unknown


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
