"""The fields of TGI, OpenAI, vLLM, SGLang and llama.cpp that set the form of the text, and which grammar each asks for.

A field's value stays as the client has sent it, so that a child process can hand it on; `asked_grammar` reads it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, Field, ValidationInfo

from text_generation_router.api.common.fields import Body
from text_generation_router.errors import GrammarError, UnsupportedParameterError, ValidationError
from text_generation_router.text.grammars.asked import MAX_BYTES, AskedGrammar, GrammarKind

Reader = Callable[[str, Any], AskedGrammar | None]


def _within_limits(value: Any, info: ValidationInfo) -> Any:
    field = str(info.field_name)
    size = 0 if value is None else len(orjson.dumps(value))
    if size > MAX_BYTES:
        raise GrammarError(field, f"it has {size} bytes, at most {MAX_BYTES} are supported")
    return value


LIMITED = AfterValidator(_within_limits)
Object = dict[str, Any]
NativeGrammar = Annotated[
    Object | None,
    LIMITED,
    Field(
        description="The form of the text, as TGI's `type` and `value`: `json`, `json_object` or `json_schema` with a"
        " JSON schema that has `properties`, as an object or as text; `regex` with a regular expression that the whole"
        " text matches. `json_object` without a value: any JSON object.",
        examples=[{"type": "json", "value": {"properties": {"age": {"type": "integer"}}, "required": ["age"]}}],
    ),
]


def asked_grammar(body: Body) -> AskedGrammar | None:
    """The form of text that the fields of the body ask for; None: free text. Raises ValidationError."""
    asked: AskedGrammar | None = None
    for name, read in READERS.items():
        value = getattr(body, name, None)
        grammar = read(name, value) if value is not None else None
        if grammar is not None and asked is not None:
            raise ValidationError.of(asked.field, f"and `{grammar.field}` both set the form of the text: send one")
        asked = grammar or asked
    return asked


def _json(field: str, value: Any) -> AskedGrammar:
    """A JSON schema, given as JSON or as text."""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return AskedGrammar(field, GrammarKind.JSON_SCHEMA, text)


def _any_object(field: str) -> AskedGrammar:
    return AskedGrammar(field, GrammarKind.JSON_SCHEMA, '{"type":"object"}')


def _text(kind: GrammarKind) -> Callable[[str, Any], AskedGrammar]:
    def read(field: str, value: Any) -> AskedGrammar:
        if not isinstance(value, str):
            raise GrammarError(field, "it must be a string")
        return AskedGrammar(field, kind, value)

    return read


def _choice(field: str, value: Any) -> AskedGrammar:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise GrammarError(field, "it must be a list of strings")
    return AskedGrammar(field, GrammarKind.CHOICE, orjson.dumps(value).decode())


_regex, _rules = _text(GrammarKind.REGEX), _text(GrammarKind.RULES)
TGI_JSON = ("json", "json_object", "json_schema")


def _tgis(field: str, value: Object) -> AskedGrammar:
    """TGI's `{"type", "value"}` object."""
    kind, given = value.get("type"), value.get("value")
    if kind == "regex":
        return _regex(field, given)
    if kind not in TGI_JSON:
        raise GrammarError(field, f"`type` must be {', '.join(TGI_JSON)} or regex")
    if kind == "json_object" and given is None:
        return _any_object(field)
    if isinstance(given, dict) and kind == "json_schema" and "schema" in given and "properties" not in given:
        given = given["schema"]
    if not isinstance(given, dict | str):
        raise ValidationError("grammar is not supported", field)
    asked = _json(field, given)
    return AskedGrammar(field, asked.kind, asked.text, needs_properties=True)


def _grammar(field: str, value: Any) -> AskedGrammar:
    return _tgis(field, value) if isinstance(value, dict) else _rules(field, value)


def _response_format(field: str, value: Object) -> AskedGrammar | None:
    kind = value.get("type")
    if "value" in value or kind in ("json", "regex"):
        return _tgis(field, value)
    if kind == "text":
        return None
    if kind == "json_object":
        return _any_object(field) if value.get("schema") is None else _json(field, value["schema"])
    if kind != "json_schema":
        raise GrammarError(field, "`type` must be text, json_object, json_schema, or TGI's json or regex")
    named = value.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise GrammarError(field, "`json_schema` must be an object whose `schema` is a JSON schema")
    if not isinstance(strict := named.get("strict"), bool | None):
        raise GrammarError(field, "`strict` must be true or false")
    return replace(_json(field, named["schema"]), is_loose=not strict)


def _any_object_if(field: str, value: Any) -> AskedGrammar | None:
    if not isinstance(value, bool):
        raise GrammarError(field, "it must be true or false")
    return _any_object(field) if value else None


# The keys of vLLM's `structured_outputs`: keys that set a form, and keys that only choose how vLLM's engine works.
STRUCTURED: Mapping[str, Reader] = MappingProxyType(
    {"json": _json, "regex": _regex, "choice": _choice, "grammar": _rules, "json_object": _any_object_if}
)
NO_EFFECT = frozenset(("backend", "_backend", "disable_fallback", "disable_additional_properties"))


def _structured(field: str, value: Object) -> AskedGrammar | None:
    asked = []
    for name, given in value.items():
        if given is None or name in NO_EFFECT or (name == "disable_any_whitespace" and given is False):
            continue
        if name not in STRUCTURED:
            raise UnsupportedParameterError(f"{field}.{name[:64]}", "is not supported")
        asked.append(STRUCTURED[name](f"{field}.{name}", given))
    found = [grammar for grammar in asked if grammar is not None]
    if len(found) != 1:
        raise GrammarError(field, f"it must have exactly one of {', '.join(STRUCTURED)}")
    return found[0]


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "response_format": _response_format,
        "structured_outputs": _structured,
        "guided_json": _json,
        "guided_regex": _regex,
        "guided_choice": _choice,
        "guided_grammar": _rules,
        "json_schema": _json,
        "regex": _regex,
        "ebnf": _rules,
        "grammar": _grammar,
    }
)
