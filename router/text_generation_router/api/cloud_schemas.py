"""The bodies in the forms of cloud platforms."""

from pydantic import Field

from text_generation_router.api.common.fields import Body
from text_generation_router.api.openai.schemas import ChatOptions
from text_generation_router.api.tgi.schemas import GenerateRequest


class VertexRequest(Body):
    """Vertex AI's form of several requests."""

    instances: tuple[GenerateRequest | ChatOptions, ...] = Field(description="Bodies of /generate, or of chats.")
