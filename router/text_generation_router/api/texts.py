"""The routes between texts and tokens, which generate nothing: /tokenize, /chat_tokenize, /detokenize."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import nullcontext

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from text_generation_router.api.common.services import Services
from text_generation_router.api.openai.chat_prompt import rendered
from text_generation_router.api.openai.fields import CHAT_BODY
from text_generation_router.api.tgi.fields import DETOKENIZE_BODY, TOKENIZE_BODY
from text_generation_router.errors import ValidationError
from text_generation_router.http.disconnect import send_unless_disconnected, unless_disconnected
from text_generation_router.http.encoding import json_response, text_json, to_json
from text_generation_router.scheduling.request import Share
from text_generation_router.text.tokens.tokenization import PART_CHARS, Span

# JSON that is sent while it is being made, because the whole JSON would take too much memory.


class JsonStream(Response):
    """JSON with an array at its end: sends `first`, `pieces` and `end`. The pieces contain their commas. An error after
    the first piece ends the connection before the JSON is complete.
    """

    def __init__(self, pieces: AsyncGenerator[bytes, None], first: bytes, end: bytes) -> None:
        self.status_code = 200
        self.media_type = None
        self.background = None
        self.init_headers({"content-type": "application/json"})
        self._pieces = pieces
        self._first = first
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_unless_disconnected(receive, self._pieces, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": self._end, "more_body": False})


# Token spans encoded in one piece. Other threads can take the interpreter lock between two pieces.
SPANS_PER_PIECE = 2048


class TextRoutes:
    """Each request takes a permit, unlike in TGI: tokenizing a long text costs as much as a short generation."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tokenize(self, request: Request) -> Response:
        """The tokens of `inputs`, special ones too, with the bytes each covers. `parameters` change nothing."""
        asked = await self._services.bodies.read(request, TOKENIZE_BODY)
        share = self._services.callers.caller_of(request).share
        return await self._tokenized(request, asked.inputs, share, add_special_tokens=True)

    async def chat_tokenize(self, request: Request) -> Response:
        """The prompt that the chat template makes of the messages, and its tokens, with the bytes each covers."""
        services = self._services
        with services.inference.counted_refusals(1):
            asked = await services.bodies.read(request, CHAT_BODY)
        services.metrics.count_requests()
        share = services.callers.caller_of(request).share
        with services.inference.counted_failures():
            text = await unless_disconnected(request.receive, rendered(services, asked, share))
        start, end = b'{"tokenize_response":[', b'],"templated_text":%b}' % text_json(text)
        return await self._tokenized(request, text, share, add_special_tokens=False, start=start, end=end)

    async def detokenize(self, request: Request) -> Response:
        """The text of the token ids, without special tokens unless `skip_special_tokens` is false."""
        services = self._services
        asked = await services.bodies.read(request, DETOKENIZE_BODY)
        size = services.inference.validator.limits.vocab_size
        outside = next((i for i in asked.tokens if i >= size), None) if size else None
        if outside is not None:
            raise ValidationError.of("tokens", f"must have token ids < {size}. Given: {outside}")
        share = services.callers.caller_of(request).share
        with services.inference.counted_failures(), services.inference.permit(share):
            decode = services.tokenizer.tokenizer.decode
            text = await asyncio.to_thread(decode, asked.tokens, skip_special_tokens=asked.skip_special_tokens)
        return json_response({"prompt": text})

    async def _tokenized(
        self,
        request: Request,
        text: str,
        share: Share,
        add_special_tokens: bool,
        start: bytes = b"[",
        end: bytes = b"]",
    ) -> Response:
        """JSON with an array of the text's tokens between `start` and `end`."""
        pieces = self._tokens(text, share, add_special_tokens)
        first = await unless_disconnected(request.receive, anext(pieces))
        if len(text) > PART_CHARS:
            return JsonStream(pieces, start + first, end)
        await pieces.aclose()
        return Response(start + first + end, media_type="application/json")

    async def _tokens(self, text: str, share: Share, add_special_tokens: bool) -> AsyncGenerator[bytes, None]:
        """The content of the JSON array, with commas, in pieces: one piece per part of the text."""
        services, is_large = self._services, len(text) > PART_CHARS
        tidied = services.bodies.tidying.after() if is_large else nullcontext()
        with tidied, services.inference.counted_failures(), services.inference.permit(share):
            comma = b""
            async for piece in services.tokenizer.spans(text, share, _encode_spans, add_special_tokens):
                yield comma + piece if piece else b""
                comma = comma or (b"," if piece else b"")


def _encode_spans(spans: list[Span]) -> bytes:
    starts = range(0, len(spans), SPANS_PER_PIECE)
    return b",".join(to_json(spans[at : at + SPANS_PER_PIECE])[1:-1] for at in starts)
