"""Has grammars made and checked in child processes before their requests are queued. Owners share the children."""

import asyncio
import logging
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import orjson

from text_generation_router.errors import GrammarError, OverloadedError
from text_generation_router.fairness import FairSlots
from text_generation_router.offload.errors import BusyError, JobError, JobFailedError, JobLostError, JobTimeoutError
from text_generation_router.offload.pool import PoolLimits, ProcessPool
from text_generation_router.scheduling.request import Share
from text_generation_router.text.grammars.asked import MadeGrammar, RefusedGrammarError
from text_generation_router.text.grammars.forms import WantedGrammar

# Texts at which child processes died, so that no further child dies at them. Uses no processes and no event loop.

MAX_TEXTS = 1024
REFUSED_S = 600.0
# Number of deaths at which a text is refused.
DEATHS = 2


class DeadlyTexts:
    """The deaths at each text, by its digest. Deaths are forgotten REFUSED_S after the last one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # with the time of the last one

    def __len__(self) -> int:
        return len(self._deaths)

    def note(self, digest: bytes) -> None:
        """Counts the death of a child process while it worked on the text with this digest."""
        self._deaths[digest] = (self._count(digest) + 1, self._clock())
        self._deaths.move_to_end(digest)
        if len(self._deaths) > MAX_TEXTS:
            self._deaths.popitem(last=False)

    def is_refused(self, digest: bytes) -> bool:
        return self._count(digest) >= DEATHS

    def _count(self, digest: bytes) -> int:
        count, last_s = self._deaths.get(digest, (0, 0.0))
        return count if self._clock() < last_s + REFUSED_S else 0


logger = logging.getLogger(__name__)

# The module is named and not imported: this process must not load llguidance.
ENTRY = "text_generation_router.text.grammars.checking_child:make_handlers"
# Child processes, of which an owner has one at most; seconds of processor time and bytes of memory for one grammar.
CHILDREN, CHECK_S, MEMORY_BYTES = 2, 1.0, 128 * 2**20
# Seconds that a job may last on a busy machine, and seconds that it may wait for a child to start.
JOB_S, START_S = 60.0, 60.0
# Grammars that are kept, and the most bytes of their texts.
MAX_KEPT, MAX_KEPT_BYTES = 256, 4 * 2**20


class CheckingChildren(Protocol):
    async def run(self, name: str, content: bytes, timeout_s: float) -> bytes:
        """Runs a job in a child process. Raises JobError."""

    async def all_ready(self) -> None:
        """Waits until there is a child for each that has died."""


def children_of(folder: Path, num_tokens: int, end_ids: tuple[int, ...]) -> ProcessPool:
    """The children, which start with the first grammar. `folder`: with the model's tokenizer. `num_tokens`: number of
    the model's logits or, if that is larger, of the tokenizer's tokens. `end_ids`: the ids that end a text."""
    limits = PoolLimits(CHILDREN, CHILDREN, START_S, MEMORY_BYTES, cpu_s=CHECK_S)
    return ProcessPool(ENTRY, orjson.dumps([str(folder.absolute()), num_tokens, end_ids]), limits)


class GrammarChecker:
    """Used in one event loop. Requests of one tenant that want the same share one check, also while it is under way.
    Each tenant waits for a slot of its own and is charged for it, so that no limit of one tenant refuses another."""

    def __init__(self, children: CheckingChildren, max_waiting: int) -> None:
        """`max_waiting`: most checks of one tenant that may wait."""
        self._children = children
        self._slots = FairSlots(CHILDREN, max_waiting, max_held=1)
        self._kept = KeptGrammars()
        self._deadly = DeadlyTexts()
        self._running: dict[tuple[bytes, Share], asyncio.Task[MadeGrammar]] = {}

    async def grammar(self, wanted: WantedGrammar, share: Share) -> MadeGrammar:
        """The grammar. Raises GrammarError if it is refused, and OverloadedError if too many checks of the tenant
        wait."""
        try:
            job = wanted.to_json()
        except RefusedGrammarError as refusal:
            raise GrammarError(wanted.field, str(refusal)) from None
        key = sha256(job).digest()
        found = self._kept.get(key)
        if found is None:
            task = self._running.get((key, share))
            if task is None:
                task = asyncio.create_task(self._checked(key, job, share))
                self._running[key, share] = task
            found = await asyncio.shield(task)
        if found.refusal:
            raise GrammarError(found.field or wanted.field, found.refusal)
        return found

    async def _checked(self, key: bytes, job: bytes, share: Share) -> MadeGrammar:
        try:
            if self._deadly.is_refused(key):
                return _refused("it has ended two processes that compiled it")
            async with self._slots.slot(share, len(job)):
                try:
                    found = self._kept.get(key) or await self._in_child(job)
                except JobLostError:
                    # The owner keeps its slot meanwhile, so that the other child stays free for others.
                    await self._children.all_ready()
                    raise
        except JobLostError as error:
            if error.is_own_fault:
                self._deadly.note(key)
            return _refused(_reason(error))
        except JobFailedError as error:
            logger.error("a grammar was refused, because its check raised %s", error.reason)
            return _refused(_reason(error))
        except (BusyError, JobTimeoutError) as error:  # no child has started, or the machine is too busy for it
            raise OverloadedError from error
        else:
            self._kept.keep(key, found)
            return found
        finally:
            del self._running[key, share]

    async def _in_child(self, job: bytes) -> MadeGrammar:
        """Raises JobError. A child that was killed from outside, such as for the machine's memory, is not the fault of
        the job, which another child then does; but only once, because the memory may be the job's."""
        try:
            answer = await self._children.run("check", job, JOB_S)
        except JobLostError as error:
            if error.is_own_fault:
                raise
            answer = await self._children.run("check", job, JOB_S)
        return MadeGrammar(**orjson.loads(answer))


def _refused(why: str) -> MadeGrammar:
    return MadeGrammar("", f"the grammar cannot be compiled: {why}")


def _reason(error: JobError) -> str:
    if isinstance(error, JobLostError) and error.status == -signal.SIGPROF:
        return f"it takes more than {CHECK_S:g} s: send a smaller one"
    if isinstance(error, JobFailedError) and error.reason == MemoryError.__name__:
        return f"it takes more than {MEMORY_BYTES >> 20} MiB: send a smaller one"
    return "the process that compiles it fails"


class KeptGrammars:
    """The results for the grammars that were asked for last, by the digests of what was asked."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, MadeGrammar] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> MadeGrammar | None:
        if (found := self._found.get(key)) is not None:
            self._found.move_to_end(key)
        return found

    def keep(self, key: bytes, found: MadeGrammar) -> None:
        if key in self._found:  # two tenants have wanted it at the same time
            return
        self._found[key] = found
        self._bytes += found.size
        while len(self._found) > MAX_KEPT or self._bytes > MAX_KEPT_BYTES:
            _, oldest = self._found.popitem(last=False)
            self._bytes -= oldest.size
