"""Starts all parts of the router from a config, serves, and stops them in order without dropping a request."""

import asyncio
import logging
import resource
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import uvloop

from text_generation_common.addresses import address_of, bound_socket, mention_openness, reachable
from text_generation_common.connection_counts import ConnectionCounts
from text_generation_common.flags.http import view_refusal
from text_generation_common.flags.kinds import GenerationConfig
from text_generation_common.models.served import implementation_of
from text_generation_common.tasks import cancelled
from text_generation_common.version import own_version
from text_generation_router.api import reading_child
from text_generation_router.api.common.body import Bodies
from text_generation_router.api.common.body_kinds import compile_schemas
from text_generation_router.api.common.fields import ListLimits
from text_generation_router.api.common.ignored import IgnoredParameters
from text_generation_router.api.common.inference import Inference
from text_generation_router.api.common.permits import Permits
from text_generation_router.api.common.services import Services
from text_generation_router.api.common.styles import ChatFormats, style_of
from text_generation_router.app import answers_at_once, create_app
from text_generation_router.config import RouterConfig
from text_generation_router.engine.protocol import Snapshot, Watchable
from text_generation_router.engines import ServedEngine, find_engine, inherited_socket
from text_generation_router.errors import ShardsError, StartError
from text_generation_router.http.accepting import SharedPlace
from text_generation_router.http.caller import Callers
from text_generation_router.http.dialects import ErrorDialects
from text_generation_router.http.gate import Gate
from text_generation_router.http.limits import SEND_BUFFER_BYTES, ConnectionLimits, LimitHits
from text_generation_router.http.room import MAX_BEYOND
from text_generation_router.http.server import Server, StopOnSignal, uvicorn_config
from text_generation_router.http.uvicorn_parts import check_uvicorn
from text_generation_router.metrics.joint import joined_with_others
from text_generation_router.metrics.metrics import Metrics
from text_generation_router.offload.pool import PoolLimits, ProcessPool
from text_generation_router.page.engine.access import ViewAccess
from text_generation_router.page.engine.history import History
from text_generation_router.page.engine.records import Records
from text_generation_router.page.engine.routes import ShownParts
from text_generation_router.text.grammars.checking import GrammarChecker, children_of
from text_generation_router.text.model_files import find_model_files, read_defaults
from text_generation_router.text.templates.files import load_chat_template
from text_generation_router.text.templates.rendering import rendering
from text_generation_router.text.tokens.detokenization import Vocabulary
from text_generation_router.text.tokens.tokenization import TextTokenizer
from text_generation_router.text.validation import RequestLimits, Validator

if TYPE_CHECKING:
    from text_generation_router.metrics.otlp import OtlpTracer

logger = logging.getLogger(__name__)

# Number of open files, pipes and sockets of this process, besides the connections of clients that the limit admits.
OTHER_DESCRIPTORS = 64 + MAX_BEYOND
# Number of child processes that read large bodies. With one child, at most one large body is in memory as Python
# objects.
CHILDREN = 1
# Seconds after the start until the child is started, unless a large body comes before: the first small requests need
# the processors.
READING_CHILD_S = 1.0
# Most large bodies that wait for the child. The number is small to bound their memory.
WAITING_BODIES = 16
# Bytes that the child may allocate: 48 for each byte of the body, which is the most that JSON takes as objects and in
# its parser (a long chat takes less than half), and at least 96 MiB.
MIN_CHILD_BYTES, CHILD_BYTES_PER_BODY_BYTE = 96 * 2**20, 48

# Seconds that a thread keeps the interpreter lock while the event loop waits for it. uvloop takes the lock several
# times for each request. Python's default is 5 ms.
SWITCH_S = 0.0005


def run(config: RouterConfig) -> None:
    """Serves until a graceful stop. Raises StartError if the router cannot start, ShardsError if it has no shards."""
    check_uvicorn()
    sys.setswitchinterval(SWITCH_S)
    allow_descriptors(config.http.max_connections)
    # A signal during the start cancels `serve`: no request was accepted yet, so this is a clean stop.
    with (
        bind(config) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        suppress(asyncio.CancelledError),
    ):
        runner.run(serve(config, listener))


def bind(config: RouterConfig) -> socket.socket:
    """The bound socket. It does not listen yet, so connections are refused until warm-up is done."""
    listener = _inherited_or_bound(config)
    shown_at = replace(config.http, hostname=listener.getsockname()[0])  # a launcher's socket is bound by its flags
    if (refused := view_refusal(shown_at, config.trusted_proxies)) is not None:
        raise StartError(": ".join(refused))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


def _inherited_or_bound(config: RouterConfig) -> socket.socket:
    if config.listen_fd is not None:
        return inherited_socket("--listen-fd", config.listen_fd)
    address = address_of(config.http.hostname, logger)
    mention_openness(address, config.http.port, logger)
    try:
        return bound_socket(address, config.http.port)
    except OSError as error:
        raise StartError(
            f"cannot listen on {address}:{config.http.port}: {error.strerror}; choose another --port or --hostname"
        ) from error


def allow_descriptors(max_connections: int) -> None:
    """Raises this process's limit of open files as far as needed and permitted."""
    wanted = max_connections + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "--max-connections %d needs %d open files, and %d are allowed: raise `ulimit -n`, or lower the flag",
            max_connections,
            wanted,
            allowed,
        )


async def serve(config: RouterConfig, listener: socket.socket) -> None:
    stop = StopOnSignal()
    files = find_model_files(config.tokenizer_name, config.files.revision, config.weights_cache_override)
    tokenizer = TextTokenizer.load(
        files.folder,
        config.requests.validation_workers,
        config.requests.max_concurrent_requests,
        # Tokenizing takes 150 times the size of a part in memory, if the part cannot be cut. A text with cuts takes
        # little.
        max_part_chars=config.requests.payload_limit // 2,
        probed=config.probed_tokenizer,
    )
    takes_defaults = config.requests.generation_config is GenerationConfig.model
    defaults = read_defaults(files.folder) if takes_defaults else {}
    chat_template = load_chat_template(files.folder, config.files.tokenizer_config_path)
    metrics, gate = Metrics(config.http.tgi_buckets), Gate()
    hits = LimitHits(metrics)
    vocabulary = Vocabulary.of(tokenizer.tokenizer)
    special_texts = frozenset(map(vocabulary.text_of, vocabulary.special_ids))
    chat_formats = ChatFormats.of(chat_template, config.formats, special_texts)
    children_setup = reading_child.setup_of(
        chat_template, chat_formats.ways, chat_formats.ways_in(style_of(config.http.tgi_dialect))
    )
    pool = ProcessPool(reading_child.ENTRY, children_setup, child_limits(config))
    served = await find_engine(config, metrics)
    engine, adapters = served.run, served.adapters
    compile_schemas()  # while the shards load; the first body of each kind would wait for it otherwise
    stack = AsyncExitStack()
    try:
        renderer = await stack.enter_async_context(rendering(chat_template, config.requests.max_concurrent_requests))
        await engine.start()
        # The launcher has checked the template with the tokenizer.
        if renderer is not None and config.probed_tokenizer is None:
            await renderer.check()
        limits = engine.snapshot().limits
        metrics.set_limits(limits.max_input_tokens, limits.max_total_tokens)
        metrics.add_adapters(adapters.digests, may_change=adapters.may_change)
        adapters.on_change = metrics.adapters.note_names
        metrics.describe(lambda: facts_of(config, engine.snapshot()))
        await stack.enter_async_context(joined_with_others(metrics, config.metrics_file))
        model = engine.snapshot().model
        num_tokens = max(model.vocab_size, tokenizer.tokenizer.get_vocab_size())
        grammar_children = children_of(files.folder, num_tokens, model.eos_token_ids)
        stack.push_async_callback(grammar_children.close)
        grammars = GrammarChecker(grammar_children, config.requests.max_concurrent_requests)
        # The limits are read for each request: the shards of a later epoch may have fewer slots.
        validator = Validator(
            tokenizer, grammars, lambda: request_limits(config, engine.snapshot(), adapters.digests), defaults
        )
        permits = Permits(served.permits, lambda: engine.load().retry_after_s, served.permits_elsewhere)
        otlp = tracer_for(config)
        if otlp is not None:
            stack.push_async_callback(otlp.close)
        shown = await stack.enter_async_context(shown_parts(config, served, gate, metrics, otlp))
        tracer = shown.records if shown is not None else otlp
        inference = Inference(
            engine=engine, vocabulary=vocabulary, validator=validator, permits=permits, metrics=metrics, tracer=tracer
        )
        callers = Callers(bool(config.api_keys), config.trusted_proxies, config.scheduling.prefix_cache_scope)
        ignored = IgnoredParameters(metrics, config.requests.strict_parameters, adapters)
        bodies = Bodies(
            config.requests.payload_limit, lambda: list_limits(config, validator.limits), callers, pool, ignored
        )
        services = Services(
            config=config,
            engine=engine,
            inference=inference,
            callers=callers,
            bodies=bodies,
            metrics=metrics,
            tokenizer=tokenizer,
            renderer=renderer,
            chat_formats=chat_formats,
            model_sha=files.sha,
            sampling_defaults=defaults,
            version=own_version(),
            gate=gate,
            limit_hits=hits,
            dialects=ErrorDialects(config.http.tgi_dialect),
            ignored=ignored,
            adapters=adapters,
            tracer=tracer,
            replicas=served.replicas,
            implementation=implementation_of(files.folder),
        )
        place = shared_place(config)
        http = uvicorn_config(
            create_app(services, shown),
            connection_limits(config),
            hits,
            at_once=answers_at_once(config),
            dialects=services.dialects,
            num_elsewhere=place.num_elsewhere if place is not None else lambda: 0,
        )

        def on_listening() -> None:
            served.listening()
            mention_addresses(config, listener.getsockname()[1])
            asyncio.get_running_loop().call_later(READING_CHILD_S, pool.start)

        patience_s = config.http.graceful_termination_timeout
        server = Server(
            config=http,
            gate=gate,
            end_streams=engine.close,
            patience_s=patience_s,
            on_listening=on_listening,
            others=served.others,
            place=place,
        )
        engine.failed.add_done_callback(lambda _: server.stop())
        await stop.serve(server, listener)
        if engine.failed.done():
            raise ShardsError("the engine has failed and generates no more text; its log line has the cause")
    finally:
        await served.close()
        tokenizer.close()
        await pool.close()
        await stack.aclose()


@asynccontextmanager
async def shown_parts(
    config: RouterConfig, served: ServedEngine, gate: Gate, metrics: Metrics, tracer: "OtlpTracer | None"
) -> AsyncGenerator[ShownParts | None, None]:
    """What the engine view shows. None: there is no access to it, so nothing is kept for it."""
    engine = served.run
    if not ViewAccess(config.admin_key_digest, config.http.engine_view).exists or not isinstance(engine, Watchable):
        yield None
        return
    history = History(engine, gate, metrics)
    keeping = asyncio.create_task(history.run(), name="history")
    try:
        yield ShownParts(engine, gate, history, Records(tracer), served.replicas)
    finally:
        await cancelled(keeping)


def mention_addresses(config: RouterConfig, port: int) -> None:
    """Logs where the server can be reached: the last line of a start. `port` is the real port, also with --port 0."""
    api = f"http://{reachable(config.http.hostname)}:{port}"
    addresses = {"api": api, "docs": f"{api}/docs", "metrics": f"{api}/metrics"}
    logger.info("Serving %s", config.served_model_name, extra={"fields": addresses})


def tracer_for(config: RouterConfig) -> "OtlpTracer | None":
    flags = config.tracing
    if flags.otlp_endpoint is None:
        return None
    # Imported here, because the packages that it needs are an extra, and take 0.4 s to load.
    from text_generation_router.metrics.otlp import OtlpTracer

    return OtlpTracer(flags.otlp_endpoint, flags.otlp_service_name, own_version(), config.served_model_name)


def connection_limits(config: RouterConfig) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=config.http.max_connections,
        payload_bytes=config.requests.payload_limit,
        write_s=config.http.stream_write_timeout,
    )


def shared_place(config: RouterConfig) -> SharedPlace | None:
    """Raises StartError if the file is not one of connection counts."""
    if config.connections_fd is None:
        return None
    try:
        return SharedPlace(ConnectionCounts(config.connections_fd), config.front_number)
    except (OSError, ValueError) as error:
        raise StartError(
            f"--connections-fd {config.connections_fd} is not a file of connection counts: {error}"
        ) from error


def facts_of(config: RouterConfig, shards: Snapshot) -> dict[str, str]:
    """The labels of tgi_info."""
    model = shards.model
    return {
        "model": config.served_model_name,
        "version": own_version(),
        "dtype": model.dtype.removeprefix("torch."),
        "kernels": model.kernels,
        "device": model.device_type,
        "shards": str(model.world_size),
    }


def request_limits(config: RouterConfig, shards: Snapshot, adapters: Mapping[str, str]) -> RequestLimits:
    model, limits = shards.model, shards.limits
    return RequestLimits(
        asked=config.requests,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        grammar_refusal=model.grammar_refusal,
        adapters=adapters,
    )


def list_limits(config: RouterConfig, limits: RequestLimits) -> ListLimits:
    return ListLimits(
        limits.max_input_tokens,
        config.requests.max_client_batch_size,
        config.requests.max_stop_sequences,
        config.requests.keep_agent_lines,
    )


def child_limits(config: RouterConfig) -> PoolLimits:
    return PoolLimits(
        children=CHILDREN,
        waiting=WAITING_BODIES,
        memory_bytes=max(MIN_CHILD_BYTES, CHILD_BYTES_PER_BODY_BYTE * config.requests.payload_limit),
    )
