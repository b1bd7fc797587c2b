import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

ROUTES = ("/generate", "/tokenize", "/v1/completions", "/v1/chat/completions")
# These read bodies as /generate does; the whole server gets the bodies in turns on all routes (test_hostile.py).
ALIKE = ("/", "/generate_stream")
FILE = Path(__file__).parents[4] / "integration-tests" / "hostile.py"


@pytest.fixture(scope="module")
def hostile():
    """The module `hostile` of the integration tests. Loaded by its path, because the integration tests are not a
    package."""
    spec = importlib.util.spec_from_file_location("hostile", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "hostile", module)  # dataclasses look up their module in sys.modules
        spec.loader.exec_module(module)
    return module


def test_a_seed_gives_the_same_thousand_bodies_every_time(hostile):
    bodies = hostile.bodies(seed=3)
    assert bodies == hostile.bodies(seed=3) != hostile.bodies(seed=4)
    assert len({(body.content, body.content_type) for body in bodies}) == len(bodies) >= 1000
    assert sum(body.refused for body in bodies) >= 500


@pytest.mark.parametrize("path", [*ROUTES, *(pytest.param(path, marks=pytest.mark.slow) for path in ALIKE)])
def test_no_hostile_body_is_a_server_error_or_is_shown_in_the_answer(make_server, hostile, path):
    server = make_server(payload_limit=2_000_000)

    async def run() -> list[str]:
        bodies = [*hostile.bodies(), *hostile.large_bodies(100_000)]
        return [wrong for body in bodies if (wrong := await verdict(body))]

    async def verdict(body) -> str:
        headers = {"content-type": body.content_type}
        answer = await server.call("POST", path, body.content, headers)
        if answer.status == 504:  # a body may set a deadline that is too short for a token
            return "" if body.name.startswith("timeout = ") else f"{body.name}: 504"
        is_refused = 400 <= answer.status < 500 or answer.body.startswith(b'data: {"error"')  # a refusal as an event
        if answer.status >= 500 or (body.refused and not is_refused):
            return f"{body.name}: {answer.status}"
        if answer.status >= 400:
            if set(answer.json) != {"error", "error_type"}:
                return f"{body.name}: an error of another shape"
            if hostile.CANARY.encode() in answer.body or b"Traceback" in answer.body:
                return f"{body.name}: the answer tells more than it should"
        return ""

    assert asyncio.run(run()) == []
    assert server.permits.left == server.config.requests.max_concurrent_requests
