"""Chooses how many values tests draw, and runs tests that are coroutines."""

import asyncio
import inspect
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest
from hypothesis import settings

import text_generation_common.tests.examples  # noqa: F401 (has the profiles)

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
