"""Routes in the forms of cloud platforms: SageMaker's /invocations and Vertex AI's /vertex."""

import time

from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.cloud_bodies import INVOCATION, VERTEX
from text_generation_router.api.common.answer import Answers
from text_generation_router.api.common.services import Services
from text_generation_router.api.openai.chat import ChatRoutes
from text_generation_router.api.openai.completions import CompletionRoutes
from text_generation_router.api.openai.schemas import ChatOptions, CompletionRequest
from text_generation_router.api.tgi.routes import GenerateRoutes, native_prompt
from text_generation_router.api.tgi.schemas import CompatGenerateRequest, GenerateRequest
from text_generation_router.errors import ValidationError
from text_generation_router.http.caller import Caller
from text_generation_router.http.disconnect import unless_disconnected
from text_generation_router.http.encoding import json_response
from text_generation_router.text.validation import Prompt


class CloudRoutes:
    def __init__(
        self, services: Services, generate: GenerateRoutes, completions: CompletionRoutes, chats: ChatRoutes
    ) -> None:
        self._services = services
        self._answers = Answers(services)
        self._generate, self._completions, self._chats = generate, completions, chats

    async def invocations(self, request: Request) -> Response:
        """A body of /, of chats or of completions: its field `inputs`, `messages` or `prompt` decides."""
        started_s = time.perf_counter()
        asked = await self._answers.read(request, INVOCATION, 1)
        if isinstance(asked, CompatGenerateRequest):
            return await self._generate.compat(request, asked)
        if isinstance(asked, ChatOptions):
            return await self._answers.answer_read(request, self._chats, asked, started_s)
        assert isinstance(asked, CompletionRequest)
        return await self._answers.answer_read(request, self._completions, asked, started_s)

    async def vertex(self, request: Request) -> Response:
        """Several bodies of /generate or of chats; answers with the texts, in order. As in TGI, tokens are drawn."""
        started_s = time.perf_counter()
        asked = await self._answers.read(request, VERTEX, 1)
        services = self._services
        services.metrics.count_requests(1 + len(asked.instances))
        with services.inference.counted_failures():
            caller = services.caller_of(request)

        async def answer() -> Response:
            with services.inference.counted_failures():
                prompts = [await self._prompt(instance, caller) for instance in asked.instances]
            results = await services.inference.results(prompts, caller, started_s)
            texts = [result.finish.generated_text for result in results]
            starts = map(_start_of, asked.instances)
            return json_response({"predictions": [start + text for start, text in zip(starts, texts, strict=True)]})

        return await unless_disconnected(request.receive, answer())

    async def _prompt(self, instance: GenerateRequest | ChatOptions, caller: Caller) -> Prompt:
        if isinstance(instance, GenerateRequest):
            if (instance.parameters.best_of or 1) > 1:
                raise ValidationError.of("best_of", "is not supported in `instances`: send the instance several times")
            drawn = instance.parameters.model_copy(update={"do_sample": True})
            return native_prompt(instance.model_copy(update={"parameters": drawn}))
        if instance.stream:
            raise ValidationError.of("stream", "is not supported in `instances`: the answer has all texts")
        if instance.choices != 1:
            raise ValidationError.of("n", "is not supported in `instances`: send the instance several times")
        if instance.calling() is not None:
            raise ValidationError.of("tools", "is not supported in `instances`: the answer has texts only")
        [prompt] = await self._chats.prompts(instance, caller)
        return prompt


def _start_of(instance: GenerateRequest | ChatOptions) -> str:
    """The text before the generated text: the prompt, if the request asks for it."""
    if isinstance(instance, GenerateRequest) and instance.parameters.return_full_text:
        return instance.inputs
    return ""
