"""A new JSON dialect needs only its own body, prompts, events and answer."""

import asyncio
from collections.abc import Sequence

import pytest
from starlette.requests import Request
from starlette.responses import Response

from text_generation_router.api.common.answer import Answers
from text_generation_router.api.common.generation import Generation
from text_generation_router.api.openai.fields import COMPLETION_BODY
from text_generation_router.api.openai.schemas import CompletionRequest
from text_generation_router.errors import TemplateError
from text_generation_router.http.sse import DirectWriter
from text_generation_router.scheduling.request import Share
from text_generation_router.text.validation import Prompt


class Loud:
    body_kind = COMPLETION_BODY
    refused_requests = 7

    def __init__(self) -> None:
        self.is_broken = self.hangs = self.was_cancelled = False

    def num_requests(self, asked: CompletionRequest) -> int:
        return 10 + len(asked.prompt)

    async def prompts(self, asked: CompletionRequest, share: Share) -> Sequence[Prompt]:
        if self.is_broken:
            raise TemplateError("too quiet", None)
        try:
            while self.hangs:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        parameters = asked.sampling_parameters(asked.max_tokens, None)
        return [Prompt(text.upper(), parameters) for text in asked.prompt]

    async def events(self, asked: CompletionRequest, generations: Sequence[Generation], writer: DirectWriter):
        for generation in generations:
            async for event in generation:
                yield event.text.upper().encode() + b"\n"

    async def answer(self, asked: CompletionRequest, results: Sequence[Generation]) -> dict[str, list[str]]:
        return {"loud": [result.finish.generated_text.upper() for result in results]}


@pytest.fixture
def loud(server) -> Loud:
    dialect, answers = Loud(), Answers(server.services)

    async def endpoint(request: Request) -> Response:
        return await answers.answer(request, dialect)

    server.app.add_route("/loud", endpoint, methods=["POST"])
    return dialect


def test_a_dialect_answers_at_once_and_as_a_stream(server, loud):
    whole = server.post("/loud", {"prompt": ["a", "bc"], "max_tokens": 2})
    assert (whole.status, whole.json) == (200, {"loud": [" THERE!", " THERE!"]})
    assert whole.headers["x-compute-type"] == "2-test-card" and whole.headers["x-generated-tokens"] == "4"
    assert server.metric("tgi_request_count_total") == 12
    streamed = server.post("/loud", {"prompt": ["a", "bc"], "max_tokens": 2, "stream": True})
    assert (streamed.status, streamed.body) == (200, b" THERE\n!\n" * 2)
    assert streamed.headers["x-compute-characters"] == "3"
    assert server.metric("tgi_request_count_total") == 24 and server.permits.left == 4


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_counted_for_every_dialect(server, loud, stream):
    assert server.post("/loud", {"prompt": "a", "stream": stream, "logits_processors": ["x"]}).status == 422
    assert server.metric("tgi_request_count_total") == 7 and server.failures("validation") == 1
    loud.is_broken = True
    assert server.post("/loud", {"prompt": "a", "stream": stream}).status == 422
    assert server.metric("tgi_request_count_total") == 18 and server.failures("template") == 1
    assert not server.engine.asked and server.permits.left == 4


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_prompts_of_a_client_that_disconnects_are_not_made(server, loud, stream):
    loud.hangs = True
    answer = asyncio.run(server.call("POST", "/loud", b'{"prompt": "a", "stream": %b}' % stream, leave_after=0))
    assert answer.status == 499 and loud.was_cancelled
    assert not server.engine.asked and server.permits.left == 4
