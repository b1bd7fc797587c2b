"""Makes the OpenAPI document of the table of operations. Starts nothing, and needs no model."""

import ast
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import orjson
from pydantic import AliasChoices, BaseModel, TypeAdapter

from text_generation_router.api.anthropic import fields as anthropic_fields
from text_generation_router.api.common.contract import Contract, Refused, Renamed
from text_generation_router.api.common.fields import Body
from text_generation_router.api.openai import fields as openai_fields
from text_generation_router.api.responses import fields as responses_fields
from text_generation_router.api.tgi import fields as tgi_fields
from text_generation_router.offload.child import Handler
from text_generation_router.openapi.anthropic_answers import AnthropicErrorJson
from text_generation_router.openapi.native_answers import ErrorJson
from text_generation_router.openapi.operation_json import ANSWER_HEADERS, Interface, Schemas, operation_json
from text_generation_router.openapi.operations import Tag
from text_generation_router.openapi.v1_answers import V1ErrorJson

NICENESS = 10

# Descriptions of the fields of request bodies: the text below a field, read from the source. pydantic could read it
# for every class, at each start; only the document needs it.


def described(root: type[BaseModel]) -> dict[str, dict[str, str]]:
    """The descriptions of `root` and of all classes that are derived from it, by the name of the class, and then by the
    field's name in the document."""
    return {kind.__name__: dict(_of(kind)) for kind in {root, *_derived(root)}}


def _derived(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _derived(derived)


def _of(kind: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name, field in kind.model_fields.items():
        owner = next(base for base in kind.__mro__ if name in inspect.get_annotations(base))
        text = field.description or _texts(inspect.getmodule(owner)).get(owner.__name__, {}).get(name)
        alias = field.validation_alias
        if text:
            yield str(alias.choices[0] if isinstance(alias, AliasChoices) else alias or name), text


@cache
def _texts(module: ModuleType | None) -> Mapping[str, Mapping[str, str]]:
    """By class and field."""
    classes = ast.parse(inspect.getsource(module)).body if module is not None else []
    return {node.name: dict(_below(node)) for node in classes if isinstance(node, ast.ClassDef)}


def _below(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(words))):
                yield name, inspect.cleandoc(words)


REF = "#/components/schemas/{model}"
CONTRACTS: dict[str, Contract] = {
    "GenerateParameters": tgi_fields.PARAMETERS,
    "CompletionRequest": openai_fields.COMPLETION,
    "ChatRequest": openai_fields.CHAT,
    "MessageBody": openai_fields.MESSAGE,
    "StreamOptions": openai_fields.STREAM_OPTIONS,
    "ResponsesRequest": responses_fields.RESPONSES,
    "TextConfig": responses_fields.TEXT,
    "ReasoningConfig": responses_fields.REASONING,
    "FunctionTool": responses_fields.TOOLS["function"],
    "TextTool": responses_fields.TOOLS["custom"],
    "NamespaceTool": responses_fields.TOOLS["namespace"],
    "CustomTool": anthropic_fields.TOOL,
    "FunctionCallItem": responses_fields.ITEMS["function_call"],
    "CustomCallItem": responses_fields.ITEMS["custom_tool_call"],
    "FunctionResultItem": responses_fields.ITEMS["function_call_output"],
    "MessagesRequest": anthropic_fields.MESSAGES,
    "CountTokensRequest": anthropic_fields.COUNT_TOKENS,
    "ToolUseBlock": anthropic_fields.BLOCKS["tool_use"],
    "ToolResultBlock": anthropic_fields.BLOCKS["tool_result"],
}


def make_handlers(setup: bytes) -> Mapping[str, Handler]:
    """For a child process, which stands back for tokens. A job is an Interface as JSON, the answer its document."""
    os.nice(NICENESS)
    # Not orjson: the schemas contain 2**64, which orjson refuses.
    return {
        "document": lambda content: json.dumps(
            document_of(Interface(**orjson.loads(content))), ensure_ascii=False
        ).encode()
    }


def document_of(interface: Interface) -> dict[str, Any]:
    made, definitions = TypeAdapter.json_schemas(list(_described(interface)), ref_template=REF)
    schemas: Schemas = {key: schema for (key, _), schema in made.items()}
    texts = described(Body)
    components: dict[str, Any] = {
        "schemas": {
            name: _component(name, _with_texts(schema, texts.get(name, {})))
            for name, schema in sorted(definitions["$defs"].items())
        },
        "headers": {name: {"description": text, "schema": {"type": "string"}} for name, text in ANSWER_HEADERS.items()},
    }
    bearer = {"type": "http", "scheme": "bearer"}
    schemes = ({"key": bearer} if interface.has_keys else {}) | ({"admin_key": bearer} if interface.has_admin else {})
    if schemes:
        components["securitySchemes"] = schemes
    paths: dict[str, dict[str, Any]] = {}
    for operation in interface.operations:
        paths.setdefault(operation.path, {})[operation.method] = operation_json(operation, interface, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Text Generation Inference",
            "version": interface.version,
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "tags": [{"name": tag.value[0], "description": tag.value[1]} for tag in Tag],
        "paths": paths,
        "components": components,
    }


def _described(interface: Interface) -> Iterator[tuple[str, Any, TypeAdapter[Any]]]:
    """What needs a schema: the key of each in `Schemas`, pydantic's mode, and the type."""
    for operation in interface.operations:
        for part, kind in (("body", operation.body), ("answer", operation.answer), ("event", operation.event)):
            if kind is not None:
                yield f"{operation.name} {part}", "validation", TypeAdapter(kind)
    for kind in (ErrorJson, V1ErrorJson, AnthropicErrorJson):
        yield kind.__name__, "validation", TypeAdapter(kind)


def _with_texts(schema: dict[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """The schema, with the descriptions of its properties. Their keys are in pydantic's order."""
    if not texts:
        return schema
    found = {name: {"description": texts[name]} if name in texts else {} for name in schema["properties"]}
    properties = {name: dict(sorted((value | found[name]).items())) for name, value in schema["properties"].items()}
    return schema | {"properties": properties}


def _component(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, and the fields that it does not have but that the server knows."""
    if name not in CONTRACTS:
        return schema
    rules = CONTRACTS[name].rules.items()
    return schema | {
        "x-refused": {field: _refusal(rule) for field, rule in sorted(rules) if isinstance(rule, Refused | Renamed)},
        "x-no-effect": [field for field, rule in sorted(rules) if not isinstance(rule, Refused | Renamed)],
    }


def _refusal(rule: Refused | Renamed) -> dict[str, Any]:
    return {"why": rule.why, "taken": [None, *rule.neutral]}
