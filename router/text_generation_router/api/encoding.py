"""Values to JSON bytes, in TGI's key order. Log-probabilities are printed as the shortest float32, NaN as null."""

from typing import Any

import numpy as np
import orjson
from starlette.responses import Response

from text_generation_router.scheduling.request import Token


def to_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def to_event(value: Any) -> bytes:
    """One server-sent event. The space behind the colon is part of the contract: clients compare whole lines."""
    return b"data: %b\n\n" % orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


DONE = b"data: [DONE]\n\n"


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(to_json(value), status, headers, "application/json")


def token_json(token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": np.float32(token.logprob), "special": token.special}
