"""The bodies in the forms of cloud platforms: SageMaker's /invocations and Vertex AI's /vertex."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from text_generation_router.api.common.body_kinds import Read, RequestBody
from text_generation_router.api.common.fields import Body, ListLimits
from text_generation_router.api.openai.fields import CHAT, CHAT_BODY, COMPLETION, COMPLETION_BODY
from text_generation_router.api.openai.schemas import ChatOptions
from text_generation_router.api.tgi.fields import COMPAT_GENERATE_BODY, GENERATE_BODY, PARAMETERS
from text_generation_router.api.tgi.schemas import GenerateRequest
from text_generation_router.errors import TooManyPromptsError, UnprocessableError


class VertexRequest(Body):
    """A body of Vertex AI, with several requests."""

    instances: tuple[GenerateRequest | ChatOptions, ...] = Field(description="Bodies of /generate, or of chats.")


# A body to /invocations is read and answered by the route of the first of these fields that the body has.
INVOKED: dict[str, RequestBody[Any]] = {
    "inputs": COMPAT_GENERATE_BODY,
    "messages": CHAT_BODY,
    "prompt": COMPLETION_BODY,
}
INSTANCES: dict[str, RequestBody[Any]] = {"inputs": GENERATE_BODY, "messages": CHAT_BODY}


def answered(value: Any, kinds: Mapping[str, RequestBody[Any]], where: str = "") -> RequestBody[Any]:
    """The kind of body of the first name in `kinds` that is a field of `value`. UnprocessableError if there is none:
    its text begins with `where`, the path of `value` in the whole body."""
    for name, kind in kinds.items():
        if isinstance(value, dict) and name in value:
            return kind
    raise UnprocessableError(where, f"Input should be an object with {' or '.join(f'`{name}`' for name in kinds)}")


def _read_invocation(value: dict[str, Any], limits: ListLimits) -> Read[Body]:
    return answered(value, INVOKED).read_value(value, limits)


def instances_of(value: dict[str, Any], limits: ListLimits) -> list[tuple[RequestBody[Any], dict[str, Any]]]:
    """The instances of a body for /vertex, each with its kind of body."""
    instances = value.get("instances")
    if not isinstance(instances, list) or not instances:
        raise UnprocessableError("instances", "Input should be a list with at least one instance")
    if len(instances) > limits.prompts:
        raise TooManyPromptsError(limits.prompts)
    return [(answered(one, INSTANCES, f"instances[{number}]"), one) for number, one in enumerate(instances)]


def _read_vertex(value: dict[str, Any], limits: ListLimits) -> Read[VertexRequest]:
    reads = [kind.read_value(one, limits) for kind, one in instances_of(value, limits)]
    unknown = tuple(name for read in reads for name in read.unknown)
    left_out = tuple(name for read in reads for name in read.left_out)
    return Read(VertexRequest(instances=tuple(read.asked for read in reads)), unknown, left_out)


def _restore_vertex(value: Any) -> VertexRequest:
    return VertexRequest(instances=tuple(BY_NAME[one["kind"]].restore(one["asked"]) for one in value["instances"]))


def _restore_invocation(value: Any) -> Body:
    asked: Body = BY_NAME[value["kind"]].restore(value["asked"])
    return asked


BY_NAME = {kind.name: kind for kind in (*INVOKED.values(), *INSTANCES.values())}
INVOCATION: RequestBody[Body] = RequestBody(
    "invocation",
    _read_invocation,
    _restore_invocation,
    PARAMETERS.known | COMPLETION.known | CHAT.known,
)
VERTEX = RequestBody("vertex", _read_vertex, _restore_vertex, PARAMETERS.known | CHAT.known)
