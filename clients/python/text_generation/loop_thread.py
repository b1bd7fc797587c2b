"""An event loop in a thread of its own, for code that is not asynchronous."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from text_generation.errors import TextGenerationError

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, which starts with the first call. `cleanup` is the last coroutine to run in the loop:
    at `close()`, or when `owner` is garbage collected.

    The loop has a thread because the caller may be inside a running loop already, as in a notebook, and because several
    threads may call at the same time.
    """

    def __init__(self, owner: object, cleanup: Callable[[], Awaitable[None]]) -> None:
        self._owner = weakref.ref(owner)
        self._cleanup = cleanup
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] = lambda: None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine in the loop and waits for its result. Interrupting the wait cancels the coroutine. An
        error of this package is raised without the frames of the loop, which say nothing about the caller's program.
        """
        try:
            with self._lock:
                future = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        except RuntimeError:
            coroutine.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise RuntimeError("this client was closed during the call") from None
        except TextGenerationError as error:
            raise error.with_traceback(None) from None
        finally:
            future.cancel()

    def post(self, coroutine: Coroutine[Any, Any, object]) -> None:
        """Runs the coroutine in the loop without waiting. Without a loop, drops it.

        `post` is for cleaning up: the garbage collector may call it in any thread, the loop's own included.
        """
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(coroutine, loop)
                return
        coroutine.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise RuntimeError("this client is closed; make a new one")
        if self._loop is None or self._thread is None:
            self._start()
        elif not self._thread.is_alive():
            raise RuntimeError("this client was used before the process forked; make one in each process")
        assert self._loop is not None
        return self._loop

    def _start(self) -> None:
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        loop, stop, cleanup = runner.get_loop(), asyncio.Event(), self._cleanup

        async def serve() -> None:
            await stop.wait()
            await cleanup()

        def main() -> None:
            with runner:
                runner.run(serve())

        owner = self._owner()
        assert owner is not None
        self._loop = loop
        self._stop = weakref.finalize(owner, loop.call_soon_threadsafe, stop.set)
        self._thread = threading.Thread(target=main, name="text-generation-client", daemon=True)
        self._thread.start()
