"""The fields of the native routes, and the kinds of their bodies."""

from typing import Any

from text_generation_router.api.common.body_kinds import body_kind, object_of, unknown_fields
from text_generation_router.api.common.contract import Contract
from text_generation_router.api.common.known_fields import RULES
from text_generation_router.api.tgi.schemas import (
    CompatGenerateRequest,
    DetokenizeRequest,
    GenerateParameters,
    GenerateRequest,
)

GENERATE = Contract.of(GenerateRequest, RULES["native"], RULES["beside"])
COMPAT_GENERATE = Contract.of(CompatGenerateRequest, RULES["native"], RULES["beside"])
PARAMETERS = Contract.of(GenerateParameters, RULES["native"])
DETOKENIZE = Contract.of(DetokenizeRequest)
TOKENIZE = Contract.of(GenerateRequest, RULES["tokenize"])


def _unknown_fields(value: dict[str, Any], contract: Contract) -> tuple[str, ...]:
    parameters = object_of(value.get("parameters"))
    unknown = unknown_fields(value, contract)
    PARAMETERS.refuse(parameters)  # as in TGI, errors name a parameter without its path
    return *unknown, *PARAMETERS.unknown(parameters, "parameters.")


GENERATE_BODY = body_kind(GenerateRequest, "generate", _unknown_fields, GENERATE, known=PARAMETERS.known)
COMPAT_GENERATE_BODY = body_kind(
    CompatGenerateRequest, "compat_generate", _unknown_fields, COMPAT_GENERATE, known=PARAMETERS.known
)
TOKENIZE_BODY = body_kind(GenerateRequest, "tokenize", unknown_fields, TOKENIZE)  # `parameters` have no effect on it
DETOKENIZE_BODY = body_kind(DetokenizeRequest, "detokenize", unknown_fields, DETOKENIZE)
