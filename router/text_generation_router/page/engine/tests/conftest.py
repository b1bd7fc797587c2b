"""The application over a scripted engine, as the tests of routes have it."""

from text_generation_router.api.tests.conftest import make_server, server, session_server, tokenizer

__all__ = ["make_server", "server", "session_server", "tokenizer"]
