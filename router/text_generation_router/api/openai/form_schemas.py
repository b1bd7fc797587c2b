"""The fields of /v1 that set the form of the text."""

from typing import Annotated

from pydantic import Field

from text_generation_router.api.common.fields import Strings
from text_generation_router.api.common.form_fields import LIMITED, Object
from text_generation_router.api.tgi.schemas import SamplingFields
from text_generation_router.text.grammars.asked import MAX_CHOICES


class FormFields(SamplingFields):
    """The fields of /v1. At most one of them may ask for a form."""

    response_format: Annotated[
        Object | None,
        LIMITED,
        Field(
            description='`{"type": "json_schema", "json_schema": {"schema": …}}`; `{"type": "json_object"}` for any'
            ' object, or with a `"schema"`, as in llama.cpp; TGI\'s `{"type", "value"}`; or `{"type": "text"}`.'
            " Unless `json_schema` has `strict` true, keywords that no grammar can follow are left out of it and"
            " named in `X-Ignored-Parameters`. Default of `strict`: false.",
            examples=[
                {
                    "type": "json_schema",
                    "json_schema": {"name": "age", "schema": {"properties": {"age": {"type": "integer"}}}},
                }
            ],
        ),
    ] = None
    structured_outputs: Annotated[
        Object | None,
        LIMITED,
        Field(description="vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar`."),
    ] = None
    guided_json: Annotated[
        Object | str | None, LIMITED, Field(description="A JSON schema, as an object or as text.")
    ] = None
    guided_regex: Annotated[
        str | None, LIMITED, Field(description="A regular expression that the whole text matches.")
    ] = None
    guided_choice: Annotated[
        Strings | None, LIMITED, Field(description=f"The text is one of these strings, at most {MAX_CHOICES}.")
    ] = None
    guided_grammar: Annotated[
        str | None, LIMITED, Field(description="A grammar in llguidance's Lark syntax or in llama.cpp's GBNF.")
    ] = None
    json_schema: Annotated[
        Object | str | None, LIMITED, Field(description="SGLang's and llama.cpp's name of `guided_json`.")
    ] = None
    regex: Annotated[str | None, LIMITED, Field(description="SGLang's name of `guided_regex`.")] = None
    ebnf: Annotated[str | None, LIMITED, Field(description="SGLang's name of `guided_grammar`.")] = None
    grammar: Annotated[
        Object | str | None,
        LIMITED,
        Field(description='llama.cpp\'s name of `guided_grammar`, or TGI\'s `{"type", "value"}`.'),
    ] = None
