"""A router without shards: the real application over a scripted engine, called through ASGI without a socket."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from text_generation_common.adapters.listed import folders_of
from text_generation_common.flags.declaration import with_flags
from text_generation_router.api import reading_child
from text_generation_router.api.admin import ReplicaControl
from text_generation_router.api.common.adapters import ServedAdapters
from text_generation_router.api.common.body import Bodies
from text_generation_router.api.common.fields import ListLimits
from text_generation_router.api.common.ignored import IgnoredParameters
from text_generation_router.api.common.inference import Inference
from text_generation_router.api.common.permits import Permits
from text_generation_router.api.common.services import Services
from text_generation_router.api.common.styles import ChatFormats, style_of
from text_generation_router.app import create_app
from text_generation_router.config import RouterConfig, RouterFlags
from text_generation_router.engine.protocol import (
    Ended,
    FirstStep,
    JoiningRules,
    Load,
    ModelInfo,
    Sink,
    Snapshot,
    Submission,
    TokenLimits,
    Tokens,
)
from text_generation_router.errors import RefusedError
from text_generation_router.http.caller import Callers
from text_generation_router.http.dialects import ErrorDialects
from text_generation_router.http.gate import Gate
from text_generation_router.http.limits import LimitHits
from text_generation_router.http.sse import EXTENSION
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.metrics.tracing import Tracer
from text_generation_router.offload.tests.in_process import InProcess
from text_generation_router.resolve import resolve
from text_generation_router.scheduling.prompt_logprobs import PromptLogprobs
from text_generation_router.scheduling.request import EndReason, GenerationRequest
from text_generation_router.serve import request_limits
from text_generation_router.text.grammars import checking_child
from text_generation_router.text.grammars.checking import GrammarChecker
from text_generation_router.text.grammars.checking_child import byte_tokenizer
from text_generation_router.text.templates import rendering_child
from text_generation_router.text.templates.chat_template import ChatTemplate
from text_generation_router.text.templates.rendering import Renderer
from text_generation_router.text.tokens.tokenization import TextTokenizer
from text_generation_router.text.validation import Validator

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class Script:
    """What the fake engine answers to one request."""

    texts: tuple[str, ...] = (" there", "!")  # "\udcXX" is the byte XX
    logprobs: tuple[float, ...] = (-0.5, -0.25)
    reason: EndReason = EndReason.LENGTH
    last_is_special: bool = False
    specials: frozenset[int] = frozenset()  # indexes of the tokens, besides the last, that are special
    cuts_character: bool = False  # the last ordinary token ends with the first byte of a character
    ends_after: tuple[int, Ended] | None = None  # tokens before the end, and how the request ends
    hang_after: int | None = None  # number of tokens after which the fake engine sends nothing more
    expires: bool = False  # whether the deadline passes after the last token
    cached_tokens: int = 0
    begins: bool = True  # False: the request stays in the queue
    turns: int = 1  # turns of the event loop before each token


class ScriptedVocabulary:
    """A vocabulary in which the ids from FIRST_ID on are the texts of the scripts, in the order in which scripts are
    used."""

    FIRST_ID = 700

    def __init__(self) -> None:
        self.special_ids: set[int] = set()
        self.token_bytes = self
        self.whole_texts: dict[int, str] = {}
        self._tokens: list[bytes] = []

    def id_of(self, token: bytes, special: bool) -> int:
        if token not in self._tokens:
            self._tokens.append(token)
        token_id = self.FIRST_ID + self._tokens.index(token)
        if special:
            self.special_ids.add(token_id)
        return token_id

    def of(self, token_id: int, previous: int | None) -> bytes:
        return self._tokens[token_id - self.FIRST_ID] if token_id >= self.FIRST_ID else b""

    def bytes_of(self, token_id: int) -> bytes:
        return self.of(token_id, None)

    def text_of(self, token_id: int) -> str:
        return self.of(token_id, None).decode(errors="ignore")


@dataclass(eq=False)
class Asked:
    """A request that the fake engine received."""

    request: GenerationRequest
    sink: Sink
    script: Script
    end: Ended | None = None
    num_kept: int | None = None  # number of tokens that the router kept when it ended the request
    over: asyncio.Event = field(default_factory=asyncio.Event)
    playing: asyncio.Task[None] | None = None
    hangs: bool = False  # whether the engine makes no more tokens until the request ends

    @property
    def cancelled(self) -> bool:
        return self.end is not None and self.end.reason is EndReason.CANCELLED

    def ends(self, end: Ended) -> None:
        if self.end is None:
            self.end = end
            self.over.set()
            self.sink.ended(end)


class FakeEngine:
    """A fake Engine whose answers are given by scripts."""

    def __init__(self) -> None:
        self.limits = TokenLimits(max_input_tokens=40, max_total_tokens=60, max_batch_total_tokens=300)
        self.vocabulary = ScriptedVocabulary()
        self.script = Script()
        self.scripts: list[Script] = []  # scripts for the next requests, one per request
        self.asked: list[Asked] = []
        self.healthy = True
        self.grammar_refusal = ""  # why the shards refuse every grammar
        self.pause_s = 1  # seconds in the `Retry-After` header of refused requests
        self.refusal: RefusedError | None = None
        self.answers_after: float | None = None  # seconds until a submission is answered; None: it is answered at once

    def submit_all(self, requests: Sequence[GenerationRequest], sinks: Sequence[Sink], credits: int) -> Submission:
        if self.refusal is not None and self.answers_after is None:
            raise self.refusal
        taken = [self._take(request, sink) for request, sink in zip(requests, sinks, strict=True)]
        answer: asyncio.Future[None] | None = None
        if self.answers_after is None:
            self._play_all(taken)
        else:
            loop = asyncio.get_running_loop()
            answer = loop.create_future()
            loop.call_later(self.answers_after, self._answer, answer, taken)
        return Submission([self.asked.index(asked) for asked in taken], answer)

    def _answer(self, answer: "asyncio.Future[None]", taken: list[Asked]) -> None:
        if answer.done():
            return
        if self.refusal is not None:
            answer.set_exception(self.refusal)
        else:
            answer.set_result(None)
            self._play_all(taken)

    def _play_all(self, taken: list[Asked]) -> None:
        for asked in taken:
            asked.playing = asyncio.create_task(self._play(asked))

    def _take(self, request: GenerationRequest, sink: Sink) -> Asked:
        asked = Asked(request, sink, self.scripts.pop(0) if self.scripts else self.script)
        self.asked.append(asked)
        return asked

    def _first_step(self, asked: Asked) -> FirstStep:
        count, top_n, given = len(asked.request.input_ids) - 1, asked.request.prompt_logprobs, None
        if top_n is not None:
            logprobs = np.arange(-1, -1 - count, -1, dtype=np.float32) / 8
            tops = np.repeat(np.arange(top_n, dtype=np.int32)[None], count, axis=0)
            given = PromptLogprobs(logprobs, tops, np.repeat(logprobs[:, None], top_n, axis=1))
        return FirstStep(0.25, asked.script.cached_tokens, given)

    async def _play(self, asked: Asked) -> None:
        script = asked.script
        if not asked.request.max_new_tokens:
            asked.end = Ended(script.reason, 0.5)
            asked.sink.take(Tokens((), (), (), 0.5, self._first_step(asked)), asked.end)
            return
        for number in range(len(script.texts) + 1):
            for _ in range(script.turns):
                await asyncio.sleep(0)
            if number == script.hang_after:
                asked.hangs = True
                await asked.over.wait()
            if asked.end is not None:
                return
            if script.ends_after is not None and number == script.ends_after[0]:
                asked.ends(script.ends_after[1])
            elif number < len(script.texts):
                self._give(asked, number)
            elif script.expires:
                asked.ends(Ended(EndReason.DEADLINE, 0.5))

    def _give(self, asked: Asked, number: int) -> None:
        script = asked.script
        last = number == len(script.texts) - 1
        special = (last and script.last_is_special) or number in script.specials
        token = script.texts[number].encode(errors="surrogateescape")
        if script.cuts_character and number == len(script.texts) - 1 - script.last_is_special:
            token += b"\xc3"
        token_id, logprob = self.vocabulary.id_of(token, special), script.logprobs[number]
        tops = (((token_id, logprob),) * asked.request.sampling.top_n_tokens,)
        first = None if number else self._first_step(asked)
        if last and not script.expires:
            asked.end = Ended(script.reason, 0.5)
        asked.sink.take(Tokens((token_id,), (logprob,), tops, 0.5, first), asked.end)

    def end(self, index: int, num_tokens: int) -> None:
        self.asked[index].num_kept = num_tokens
        self.asked[index].ends(Ended(EndReason.STOPPED, 0.5))

    def cancel(self, index: int) -> None:
        self.asked[index].ends(Ended(EndReason.CANCELLED, 0.5))

    def credit(self, index: int, tokens: int) -> None:
        pass

    def has_begun(self, index: int) -> bool:
        return self.asked[index].script.begins

    def snapshot(self) -> Snapshot:
        model = ModelInfo("torch.float32", "cpu", 1000, 60, (), "reference", 1, 1, grammar_refusal=self.grammar_refusal)
        return Snapshot(model, self.limits, JoiningRules(1.2, 20, 7))

    def load(self) -> Load:
        return Load(self.pause_s)

    async def is_healthy(self) -> bool:
        return self.healthy


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def told(self) -> dict[str, str]:
        """The error in the form of TGI's routes, whatever the dialect. In a stream: the error of its first event or,
        after a response has begun, of its last event."""
        is_stream = self.headers.get("content-type") == "text/event-stream"
        value = self.events[0] if is_stream else self.json
        if value.get("type") == "response.created":
            error = self.events[-1]["response"]["error"]
            return {"error": error["message"], "error_type": {"rate_limit_exceeded": "overloaded"}[error["code"]]}
        text = value["error"]["message"] if isinstance(value["error"], dict) else value["error"]
        return {"error": text, "error_type": value["error_type"]}

    @property
    def events(self) -> list[Any]:
        """The values of the answer's `data:` lines. JSON is parsed; `[DONE]` stays a string. An event that has a name
        has it as its `type` too."""
        events = self.body.decode().split("\n\n")
        assert events.pop() == ""
        return [_event(event) for event in events]


def _event(event: str) -> Any:
    if event == "data: [DONE]":
        return "[DONE]"
    name, is_named, data = event.rpartition("\ndata: ") if event.startswith("event: ") else ("", "", event[6:])
    assert is_named or event.startswith("data: ")
    value = json.loads(data)
    assert not is_named or value["type"] == name.removeprefix("event: ")
    return value


# With an id of its own no answer differs from another one by a random id.
HEADERS = {"content-type": "application/json", "x-request-id": "test"}


@dataclass(frozen=True)
class Route:
    """The path of a generating route, and a body for it."""

    path: str
    body: dict[str, Any]

    @property
    def is_openais(self) -> bool:
        """Whether the route has OpenAI's form: all fields in one object, and OpenAI's HTTP statuses of errors."""
        return self.path.startswith("/v1/")

    def status(self, native: int) -> int:
        """The status of an error whose status on TGI's routes is `native`."""
        return {422: 400, 424: 500}.get(native, native) if self.is_openais else native

    @property
    def ends_with_done(self) -> bool:
        """Whether each stream has `[DONE]` as its last event."""
        return self.path in ("/v1/completions", "/v1/chat/completions")

    @property
    def fails_as_event(self) -> bool:
        """Whether every error of this route is an event of a stream, even an error in the request itself."""
        return self.path == "/generate_stream"


ROUTES = (
    Route("/", {"inputs": "Hi"}),
    Route("/generate", {"inputs": "Hi"}),
    Route("/generate_stream", {"inputs": "Hi"}),
    Route("/v1/completions", {"prompt": "Hi"}),
    Route("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    Route("/v1/responses", {"input": "Hi"}),
    Route("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}),
)


class OpenResponse:
    """A response whose events may be written directly: each chunk goes to `take`."""

    disconnected = response_complete = False
    chunked_encoding = True

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.flow = SimpleNamespace(write_paused=False)
        self.transport = self
        self._take = take

    def write(self, chunks: bytes) -> None:
        while chunks:
            size, _, rest = chunks.partition(b"\r\n")
            end = int(size, 16)
            assert end and rest[end : end + 2] == b"\r\n"
            self._take(rest[:end])
            chunks = rest[end + 2 :]


async def _leave(gone: asyncio.Event, after: int | None, when: Callable[[], bool] | None) -> None:
    if when is not None:
        while not when():
            await asyncio.sleep(0.01)
        gone.set()
    elif after == 0:
        await asyncio.sleep(0.3)
        gone.set()


# Most tests make a server of their own, and most servers have the same template: it is compiled once.
chat_template = cache(lambda source: ChatTemplate(source, {}))
reading_handlers = cache(reading_child.make_handlers)
rendering_handlers = cache(rendering_child.make_handlers)


class Server:
    """The application and its parts. `leave_after`: number of body messages after which the client disconnects; if 0,
    it disconnects 0.3 s after the call. `leave_when`: it disconnects when this is true."""

    writes_directly = True  # whether events may be written past ASGI, as in `Connection`

    def __init__(
        self,
        tokenizer: Tokenizer,
        tracer: Tracer | None = None,
        template: str = TEMPLATE,
        replicas: ReplicaControl | None = None,
        defaults: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.engine, self.metrics = FakeEngine(), Metrics()
        limits = self.engine.limits
        self.metrics.set_limits(limits.max_input_tokens, limits.max_total_tokens)
        self.config = make_config(**config)
        folders = folders_of(self.config.adapter_list.lora_dirs)
        self.adapters = ServedAdapters(self.config.adapters, folders, None, (self.config.served_model_name,))
        most = self.config.requests.max_concurrent_requests
        self.permits = Permits(lambda: most, lambda: self.engine.load().retry_after_s)
        self.tokenizer = TextTokenizer.of(tokenizer, workers=1, max_waiting=32)
        self.tokenizer.max_chars_per_token = None
        grammars = GrammarChecker(InProcess(checking_child.handlers_of(byte_tokenizer())), max_waiting=16)
        validator = Validator(
            self.tokenizer,
            grammars,
            lambda: request_limits(self.config, self.engine.snapshot(), self.adapters.digests),
            defaults or {},
        )
        inference = Inference(self.engine, self.engine.vocabulary, validator, self.permits, self.metrics, tracer)
        chats = chat_template(template)
        chat_formats = ChatFormats.of(chats, self.config.formats, frozenset({"</s>"}))
        self.gate, self.limit_hits = Gate(), LimitHits(self.metrics)
        callers = Callers(
            bool(self.config.api_keys), self.config.trusted_proxies, self.config.scheduling.prefix_cache_scope
        )
        chat_ways = chat_formats.ways_in(style_of(self.config.http.tgi_dialect))
        self.offload = InProcess(reading_handlers(reading_child.setup_of(chats, chat_formats.ways, chat_ways)))
        requests = self.config.requests
        lists = ListLimits(
            limits.max_input_tokens,
            requests.max_client_batch_size,
            requests.max_stop_sequences,
            requests.keep_agent_lines,
        )
        ignored = IgnoredParameters(self.metrics, self.config.requests.strict_parameters, self.adapters)
        self.metrics.add_adapters(self.adapters.digests, self.adapters.may_change)
        self.adapters.on_change = self.metrics.adapters.note_names
        services = Services(
            self.config,
            self.engine,
            inference,
            callers,
            Bodies(self.config.requests.payload_limit, lambda: lists, callers, self.offload, ignored),
            self.metrics,
            self.tokenizer,
            Renderer(chats, InProcess(rendering_handlers(orjson.dumps(chats.setup))), max_waiting=16),
            chat_formats,
            None,
            defaults or {},
            "1.2.3",
            self.gate,
            self.limit_hits,
            ErrorDialects(self.config.http.tgi_dialect),
            ignored,
            self.adapters,
            tracer,
            replicas,
        )
        self.services = services
        self.app = create_app(services)

    def get(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        return asyncio.run(self.call(method, path, b"", headers or {}))

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return asyncio.run(self.call("POST", path, content, headers))

    def ask(self, route: Route, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        return self.post(route.path, route.body | fields, HEADERS | (headers or {}))

    async def call(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: dict[str, str] | None = None,
        leave_after: int | None = None,
        pieces: Sequence[bytes] = (),
        client: str = "192.0.2.1",
        leave_when: Callable[[], bool] | None = None,
    ) -> Answer:
        headers = HEADERS if headers is None else headers
        answer, gone = Answer(), asyncio.Event()
        leaving = asyncio.create_task(_leave(gone, leave_after, leave_when))
        parts = list(pieces) or [body]

        async def receive() -> dict[str, Any]:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {key.decode(): value.decode() for key, value in message["headers"]}
            elif message.get("body"):
                take(message["body"])

        def take(chunk: bytes) -> None:
            answer.chunks.append(chunk)
            if leave_after is not None and len(answer.chunks) >= leave_after:
                gone.set()

        raw_headers = [(key.encode(), value.encode()) for key, value in headers.items()]
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": raw_headers, "client": (client, 4711), "http_version": "1.1", "scheme": "http",
            "server": ("127.0.0.1", 80),
            "extensions": {EXTENSION: OpenResponse(take)} if self.writes_directly else {},
        }  # fmt: skip
        try:
            await asyncio.wait_for(self.app(scope, receive, send), 60)
        finally:
            leaving.cancel()
        return answer

    def hangs(self, count: int = 1) -> bool:
        """Whether `count` requests have made their last token (`hang_after`)."""
        return sum(asked.hangs for asked in self.engine.asked) >= count

    def failures(self, err: str) -> float:
        return self.metrics.registry.get_sample_value("tgi_request_failure_total", {"err": err}) or 0.0

    def metric(self, name: str) -> float:
        value = self.metrics.registry.get_sample_value(name)
        assert value is not None
        return value


PLAIN = with_flags(
    resolve(RouterFlags(tokenizer_name="local/model", master_shard_uds_path="/tmp/none-0")),
    max_concurrent_requests=4,
    max_client_batch_size=3,
    validation_workers=1,
    payload_limit=10_000,
    hostname="127.0.0.1",
    port=0,
    compute_type="2-test-card",
    max_connections=100,
)


def make_config(**changes: Any) -> RouterConfig:
    return with_flags(PLAIN, **changes)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer with a token for every byte and for a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, hello there"] * 9, trainer)
    return tokenizer


@pytest.fixture
def server(tokenizer: Tokenizer) -> Server:
    return Server(tokenizer)


@pytest.fixture(scope="session")
def session_server(tokenizer: Tokenizer) -> Server:
    """A server for property tests, which run many examples in one test."""
    return Server(tokenizer)


@pytest.fixture(params=ROUTES, ids=lambda route: route.path)
def route(request: pytest.FixtureRequest) -> Route:
    return request.param


@pytest.fixture
def make_server(tokenizer: Tokenizer) -> Any:
    return lambda **config: Server(tokenizer, **config)
