"""Checks grammars before their requests are queued: in threads that owners share fairly, each with a deadline."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256

import orjson

from text_generation_router.errors import GrammarError
from text_generation_router.fair_threads import FairThreads
from text_generation_router.scheduling.share import Share
from text_generation_router.text.grammars.asked import AskedGrammar, RefusedGrammarError
from text_generation_router.text.grammars.conversion import converted
from text_generation_router.text.grammars.loosening import loosened
from text_generation_router.text.grammars.verification import verify

# Threads that check, of which an owner has one at most, and how far they stand back for tokens; seconds of work after
# which a check counts as failed.
THREADS, NICENESS, CHECK_S = 2, 10, 1.0
# Grammars that are kept, and the most bytes of their texts.
MAX_KEPT, MAX_KEPT_BYTES = 256, 4 * 2**20


@dataclass(frozen=True, slots=True)
class Checked:
    grammar: str  # llguidance's JSON text; "" if it is refused
    refusal: str = ""  # why it is refused
    left_out: tuple[str, ...] = ()  # names of the schema's keywords that the grammar does not follow
    followed: str = ""  # the text of what was asked without these; "": the whole text

    @property
    def size(self) -> int:
        return len(self.grammar) + len(self.refusal) + len(self.followed)


def check(asked: AskedGrammar) -> Checked:
    if not asked.is_loose:
        return _checked(asked)
    try:
        loose, left_out = loosened(asked, lambda one: not _checked(one).refusal)
    except (RefusedGrammarError, orjson.JSONDecodeError):
        return _checked(asked)
    return replace(_checked(loose), left_out=left_out, followed=loose.text if left_out else "")


def _checked(asked: AskedGrammar) -> Checked:
    try:
        grammar = converted(asked)
        verify(grammar)
    except RefusedGrammarError as error:
        return Checked("", str(error))
    return Checked(grammar)


class GrammarChecker:
    """Used in one event loop. Requests for the same grammar share one check, also while it is under way."""

    def __init__(self, max_waiting: int, check: Callable[[AskedGrammar], Checked] = check) -> None:
        """`max_waiting`: most checks of one tenant that may wait."""
        self._threads = FairThreads(THREADS, max_waiting, "grammar", max_held=1, niceness=NICENESS)
        self._check = check
        self._kept = KeptGrammars()
        self._running: dict[bytes, asyncio.Task[Checked]] = {}

    async def grammar(self, asked: AskedGrammar, share: Share) -> Checked:
        """The grammar. Raises GrammarError if it is refused, and OverloadedError if too many checks of the tenant
        wait."""
        key = sha256(f"{asked.kind}\0{asked.needs_properties}\0{asked.is_loose}\0{asked.text}".encode()).digest()
        found = self._kept.get(key)
        if found is None:
            task = self._running.get(key)
            if task is None:
                task = asyncio.create_task(self._checked(key, asked, share))
                self._running[key] = task
            found = await asyncio.shield(task)
        if found.refusal:
            raise GrammarError(asked.field, found.refusal)
        return found

    async def _checked(self, key: bytes, asked: AskedGrammar, share: Share) -> Checked:
        try:
            found = await self._in_time(asked, share)
        except TimeoutError:  # the result is not kept, because the machine may have been busy
            return Checked("", f"the {asked.kind} takes more than {CHECK_S:g} s to check: send a smaller one")
        else:
            self._kept.keep(key, found)
            return found
        finally:
            del self._running[key]

    async def _in_time(self, asked: AskedGrammar, share: Share) -> Checked:
        """Raises TimeoutError CHECK_S after the check has begun. Its thread goes on until llguidance has finished."""
        loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

        def work() -> Checked:
            loop.call_soon_threadsafe(has_begun.set)
            return self._check(asked)

        job = asyncio.ensure_future(self._threads.run(share, len(asked.text), work))
        begin = asyncio.ensure_future(has_begun.wait())
        try:
            await asyncio.wait((job, begin), return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(CHECK_S):
                return await job
        finally:
            begin.cancel()
            job.cancel()

    def close(self) -> None:
        self._threads.close()


class KeptGrammars:
    """The results for the grammars that were asked for last, by the digests of what was asked."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, Checked] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> Checked | None:
        if (found := self._found.get(key)) is not None:
            self._found.move_to_end(key)
        return found

    def keep(self, key: bytes, found: Checked) -> None:
        self._found[key] = found
        self._bytes += found.size
        while len(self._found) > MAX_KEPT or self._bytes > MAX_KEPT_BYTES:
            _, oldest = self._found.popitem(last=False)
            self._bytes -= oldest.size
