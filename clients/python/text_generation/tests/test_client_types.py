"""Tests which values a request refuses before it is sent, and which fields an answer may lack."""

import inspect
import math
from typing import Any

import pytest

from text_generation import AsyncClient, Client, types
from text_generation.errors import ValidationError
from text_generation.requests import to_json


@pytest.mark.parametrize(
    "name", ["best_of", "repetition_penalty", "frequency_penalty", "temperature", "top_k", "truncate", "top_n_tokens"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_what_must_be_positive_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValidationError, match=f"^`{name}` must be strictly positive$"):
        types.Parameters(**{name: value})


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
@pytest.mark.parametrize("value", [0, 1, -0.5, 1.5])
def test_a_probability_lies_strictly_between_0_and_1(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=f"^`{name}` must be > 0.0 and < 1.0$"):
        types.Parameters(**{name: value})
    assert types.Parameters(**{name: 0.5})


def test_a_negative_seed_is_refused_and_zero_is_not() -> None:
    assert types.Parameters(seed=0).seed == 0
    with pytest.raises(ValidationError, match="`seed` must be positive"):
        types.Parameters(seed=-1)


def test_best_of_needs_sampling_and_no_seed() -> None:
    with pytest.raises(ValidationError, match="you must use sampling when `best_of` is > 1"):
        types.Parameters(best_of=2)
    with pytest.raises(ValidationError, match="`seed` must not be set when `best_of` is > 1"):
        types.Parameters(best_of=2, do_sample=True, seed=1)
    for warper in ({"do_sample": True}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}):
        assert types.Parameters(best_of=2, **warper).best_of == 2
    assert types.Parameters(best_of=1, seed=1)


def test_an_empty_grammar_or_prompt_is_refused() -> None:
    for kind, empty in (("regex", ""), ("json", ""), ("json", {})):
        with pytest.raises(ValidationError, match=f"`value` cannot be empty for `{kind}` grammar"):
            types.Parameters(grammar=types.Grammar(type=kind, value=empty))
    with pytest.raises(ValidationError, match="`inputs` cannot be empty"):
        types.Request(inputs="")


def test_a_stream_has_one_sequence() -> None:
    several = types.Parameters(best_of=2, do_sample=True)
    with pytest.raises(ValidationError, match="`best_of` != 1 is not supported when `stream` == True"):
        types.Request(inputs="a", parameters=several, stream=True)
    assert types.Request(inputs="a", parameters=several)


@pytest.mark.parametrize("options", [{"max_new_tokens": "many"}, {"temperature": math.nan}, {"top_k": 1.5}])
def test_a_wrong_type_is_our_validation_error_and_names_the_field(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"^`{next(iter(options))}`: "):
        Client("http://server").generate_stream("a", **options)


def test_none_is_left_out_but_nulls_inside_a_schema_stay() -> None:
    schema = {"properties": {"a": {"default": None}}}
    parameters = types.Parameters(grammar=types.Grammar(type="json", value=schema))
    body = to_json(types.Request(inputs="a", parameters=parameters))
    assert body.count(b"null") == 1 and b'{"default":null}' in body


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"max_tokens": 3}, "`extra_body` must not contain `max_tokens`, which is a parameter of its own"),
        ({"stream": True}, "`extra_body` must not contain `stream`, which is a parameter of its own"),
        ({"a": math.nan}, "`extra_body` cannot be written as JSON: "),
        ({"a": {1}}, "`extra_body` cannot be written as JSON: "),
    ],
)
def test_further_fields_of_a_body_are_new_and_are_json(caller: Any, extra: dict[str, Any], text: str) -> None:
    for name, prompt in (("chat", [{"role": "user", "content": "hi"}]), ("completion", "hi")):
        with pytest.raises(ValidationError, match=f"^{text}"):
            caller.call(name, prompt, extra_body=extra, client={})


# The parameters of TGI's client, in its order, with the defaults that are not None.
PARAMETERS = {
    "generate": "prompt do_sample=False max_new_tokens=20 best_of repetition_penalty frequency_penalty"
    " return_full_text=False seed stop_sequences temperature top_k top_p truncate typical_p watermark=False"
    " decoder_input_details=False top_n_tokens grammar",
    "generate_stream": "prompt do_sample=False max_new_tokens=20 repetition_penalty frequency_penalty"
    " return_full_text=False seed stop_sequences temperature top_k top_p truncate typical_p watermark=False"
    " top_n_tokens grammar",
    "chat": "messages repetition_penalty frequency_penalty logit_bias logprobs top_logprobs max_tokens n"
    " presence_penalty stream=False seed temperature top_p tools tool_prompt tool_choice stop",
    "completion": "prompt frequency_penalty max_tokens repetition_penalty seed stream=False temperature top_p stop",
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_the_parameters_are_those_of_tgis_client(client: type, name: str) -> None:
    owner, first, *others = inspect.signature(getattr(client, name)).parameters.values()
    by_position = [p for p in others if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    has_value = [f"{p.name}={p.default}" if p.default is not None else p.name for p in by_position]
    assert " ".join([first.name, *has_value]) == PARAMETERS[name]
    assert owner.name == "self" and first.default is inspect.Parameter.empty
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is None for p in others if p not in by_position)


def test_a_stream_event_of_an_old_server_lacks_index_and_input_length() -> None:
    event = types.StreamResponse.model_validate(
        {
            "token": {"id": 1, "text": "a", "logprob": None, "special": False},
            "generated_text": "a",
            "details": {"finish_reason": "length", "generated_tokens": 1, "seed": None},
        }
    )
    assert event.index is None and event.details is not None and event.details.input_length is None
    assert event.details.finish_reason is types.FinishReason.Length


def test_a_text_may_end_at_its_deadline_without_a_token() -> None:
    event = types.StreamResponse.model_validate(
        {
            "index": 3,
            "token": {"id": 0, "text": "", "logprob": 0.0, "special": True},
            "generated_text": "ab",
            "details": {
                "finish_reason": "deadline",
                "generated_tokens": 2,
                "seed": None,
                "cached_tokens": 1,
                "input_length": 4,
            },
        }
    )
    assert event.details is not None and event.details.finish_reason is types.FinishReason.Deadline
    assert (event.details.generated_tokens, event.details.cached_tokens, event.token.special) == (2, 1, True)
