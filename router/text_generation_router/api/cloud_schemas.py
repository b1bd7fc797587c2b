"""The bodies in the forms of cloud platforms."""

from pydantic import Field

from text_generation_router.api.fields import Body
from text_generation_router.api.schemas import GenerateRequest
from text_generation_router.api.v1_schemas import ChatOptions


class VertexRequest(Body):
    """Vertex AI's form of several requests."""

    instances: tuple[GenerateRequest | ChatOptions, ...] = Field(description="Bodies of /generate, or of chats.")
