from contextlib import AbstractAsyncContextManager

import pytest

from text_generation_router.engine_service.tests.raw_front import EngineWorld, serving


@pytest.fixture
def world() -> AbstractAsyncContextManager[EngineWorld]:
    return serving()
