"""The fields of the native routes, and the kinds of their bodies."""

from typing import Any

from text_generation_router.api.common.body_kinds import body_kind, object_of, unknown_fields
from text_generation_router.api.common.contract import Contract, Refused, Renamed
from text_generation_router.api.common.known_fields import COMMON, Rules
from text_generation_router.api.tgi.schemas import (
    CompatGenerateRequest,
    DetokenizeRequest,
    GenerateParameters,
    GenerateRequest,
)

CUT_STOP = Refused("must be true: a text of this route keeps the stop string that ended it", (True,))
NATIVE: Rules = COMMON | {
    "response_format": Renamed("grammar", ({"type": "text"},)),
    "structured_outputs": Renamed("grammar"),
    "guided_json": Renamed("grammar"),
    "guided_regex": Renamed("grammar"),
    "guided_choice": Renamed("grammar"),
    "guided_grammar": Renamed("grammar"),
    "json_schema": Renamed("grammar"),
    "regex": Renamed("grammar"),
    "ebnf": Renamed("grammar"),
    "add_special_tokens": Refused(neutral=(True,)),
    "include_stop_str_in_output": CUT_STOP,
    "max_tokens": Renamed("max_new_tokens"),
    "max_completion_tokens": Renamed("max_new_tokens"),
    "min_tokens": Renamed("min_new_tokens", (0,)),
    "stop_sequences": Renamed("stop", ([],)),
    "logprobs": Renamed("top_n_tokens", (False, 0)),
    "top_logprobs": Renamed("top_n_tokens", (0,)),
    "ignore_eos": Renamed("ignore_eos_token", (False,)),
}
TOKENIZE_RULES: Rules = {"add_special_tokens": Refused(neutral=(True,))}

# Beside `parameters`, where most fields of `parameters` are unknown, the form of the text is not passed over.
BESIDE: Rules = NATIVE | {"grammar": Refused("is a field of `parameters`")}
GENERATE = Contract.of(GenerateRequest, BESIDE)
COMPAT_GENERATE = Contract.of(CompatGenerateRequest, BESIDE)
PARAMETERS = Contract.of(GenerateParameters, NATIVE)
DETOKENIZE = Contract.of(DetokenizeRequest, {})
TOKENIZE = Contract.of(GenerateRequest, TOKENIZE_RULES)


def _unknown_fields(value: dict[str, Any], contract: Contract) -> tuple[str, ...]:
    parameters = object_of(value.get("parameters"))
    unknown = unknown_fields(value, contract)
    PARAMETERS.refuse(parameters)  # as in TGI, errors name a parameter without its place
    return *unknown, *PARAMETERS.unknown(parameters, "parameters.")


GENERATE_BODY = body_kind(GenerateRequest, "generate", _unknown_fields, GENERATE, known=PARAMETERS.known)
COMPAT_GENERATE_BODY = body_kind(
    CompatGenerateRequest, "compat_generate", _unknown_fields, COMPAT_GENERATE, known=PARAMETERS.known
)
TOKENIZE_BODY = body_kind(GenerateRequest, "tokenize", unknown_fields, TOKENIZE)  # `parameters` have no effect on it
DETOKENIZE_BODY = body_kind(DetokenizeRequest, "detokenize", unknown_fields, DETOKENIZE)
