"""Sets how many steps state machine tests run: about 2,000 of the scheduler in `make test`, 6,000 in `make test-slow`,
100,000 and more in `make fuzz`; how many texts the readers of calls get; and how many cases `make test-schema` sends to
each route. Runs tests that are coroutines."""

import asyncio
import inspect
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest
from hypothesis import settings

from text_generation_common.tests.examples import MANY

settings.register_profile("test", max_examples=MANY // 3, stateful_step_count=50, deadline=None)
settings.register_profile("many", max_examples=MANY, stateful_step_count=50, deadline=None)
settings.register_profile("fuzz", max_examples=3000, stateful_step_count=60, deadline=None)
settings.register_profile("schema", max_examples=1000, deadline=None)
settings.load_profile("test")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in an event loop of its own, within those of its fixtures that are asynchronous
    context managers: the test gets what they yield."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        values = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        async with AsyncExitStack() as stack:
            for name, value in values.items():
                if isinstance(value, AbstractAsyncContextManager):
                    values[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**values)

    asyncio.run(run())
    return True
