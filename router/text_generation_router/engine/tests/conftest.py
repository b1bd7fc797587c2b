"""Tests of the engine's behaviour that run twice: with sinks in its process, and behind gRPC on a unix socket."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from text_generation_common.cluster.endpoints import UnixEndpoint
from text_generation_common.cluster.identity import Role
from text_generation_common.cluster.security import Security
from text_generation_router.engine.protocol import EngineRun
from text_generation_router.engine.tests import fakes
from text_generation_router.engine_service.identity import EngineIdentity
from text_generation_router.engine_service.server import EngineServer
from text_generation_router.fleet.engine import RemoteEngine


@asynccontextmanager
async def behind_grpc(path: Path, world: fakes.World) -> AsyncIterator[EngineRun]:
    """The engine of `world` as a front in another process has it."""
    endpoint, logger = UnixEndpoint(str(path)), logging.getLogger("test")
    service, client = (Security(role, None, insecure=False, logger=logger) for role in (Role.ENGINE, Role.FRONT))
    server = EngineServer(world.engine, EngineIdentity("life 1", 1, b"digest"), world.metrics, 16, service)
    await server.listen(endpoint)
    front = RemoteEngine([endpoint], client)
    try:
        await front.start()
        yield front
        assert front.counts.broken_rules == front.counts.lost_engines == 0
    finally:
        await front.close()
        await server.close()


def front_of(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    is_behind = getattr(request, "param", "") == "behind gRPC"
    return {"front": partial(behind_grpc, tmp_path / "engine")} if is_behind else {}


@pytest.fixture(params=fakes.WAYS)
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """`fakes.serve`, with sinks in the engine's process or behind gRPC."""
    return partial(fakes.serve, **front_of(request, tmp_path))


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractAsyncContextManager[fakes.World]:
    """`fakes.served`, with sinks in the engine's process or, in one of the cases of `both_ways`, behind gRPC."""
    return fakes.served(**front_of(request, tmp_path))
