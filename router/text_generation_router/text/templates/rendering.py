"""Renders chats to prompts. The model's template is an untrusted program that may never end, so it runs in child
processes, unless its source shows that rendering is cheap."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

import orjson

from text_generation_router.errors import OverloadedError, StartError, TemplateError
from text_generation_router.fairness import FairSlots
from text_generation_router.offload.errors import BusyError, JobError, JobFailedError, JobLostError, JobTimeoutError
from text_generation_router.offload.pool import PoolLimits, ProcessPool
from text_generation_router.scheduling.request import Share
from text_generation_router.text.templates.chat_template import ChatTemplate, Conversation
from text_generation_router.text.templates.jinja_template import MAX_RENDER_S
from text_generation_router.text.templates.rendering_child import CHECK, ENTRY, RENDER, Kind

# Two child processes: a client whose chats make the template run to its time limit occupies only one of them.
CHILDREN = 2
# Bytes that a child may allocate in addition to its memory at the start. A chat of 64 KiB takes less than 1 MiB.
MEMORY_BYTES = 48 * 2**20
# Seconds after which a job's child is killed. JinjaTemplate itself stops a template after MAX_RENDER_S seconds, but
# only when the template writes text.
JOB_S = MAX_RENDER_S + 0.5
START_S = 60.0


class Children(Protocol):
    async def run(self, name: str, content: bytes, timeout_s: float) -> bytes:
        """Runs a job in a child process. Raises JobError."""


def children_of(template: ChatTemplate) -> ProcessPool:
    limits = PoolLimits(CHILDREN, CHILDREN, START_S, MEMORY_BYTES)
    return ProcessPool(ENTRY, orjson.dumps(template.setup), limits)


class Renderer:
    def __init__(self, template: ChatTemplate, children: Children, max_waiting: int, job_s: float = JOB_S) -> None:
        """`max_waiting`: most chats of one tenant that may wait."""
        self.template = template
        self._children = children
        self._job_s = job_s
        self._slots = FairSlots(CHILDREN, max_waiting, max_held=CHILDREN - 1)
        # Each job ends within `job_s` seconds, or when the children are closed.
        self._jobs: set[asyncio.Task[bytes]] = set()

    async def check(self) -> None:
        """Compiles the template in a child process. Raises StartError if it cannot be compiled."""
        try:
            answer = (await self._children.run(CHECK, b"", self._job_s)).decode()
        except JobError as error:
            raise StartError(
                f"the model's chat template cannot be compiled within {MEMORY_BYTES >> 20} MiB and {self._job_s:g} s "
                f"({_reason(error)}); give another one with --tokenizer-config-path"
            ) from error
        if answer[0] == Kind.ERROR:
            raise StartError(answer[1:])

    async def render(self, conversation: Conversation, share: Share) -> str:
        """Renders the chat to a prompt, as ChatTemplate.render does. Raises TemplateError or OverloadedError."""
        if self.template.is_cheap(conversation):
            return self.template.render(conversation)
        content = orjson.dumps(conversation)
        await self._slots.acquire(share, len(content))
        try:
            answer = (await asyncio.shield(self._started(content, share))).decode()
        except BusyError as error:  # no child could be started
            raise OverloadedError from error
        except JobError as error:
            raise TemplateError(f"the prompt was not rendered: {_reason(error)}") from error
        if answer[0] == Kind.ERROR:
            param, _, text = answer[1:].partition("\n")
            raise TemplateError.restored(text, param)
        return answer[1:]

    def _started(self, content: bytes, share: Share) -> asyncio.Task[bytes]:
        """Starts a job, which holds its slot until it ends: the child stays busy even if the request is cancelled."""

        def ended(job: asyncio.Task[bytes]) -> None:
            self._jobs.discard(job)
            self._slots.release(share)
            if not job.cancelled():
                # Otherwise asyncio would log the error as never retrieved; `render` raises it if its caller still
                # waits.
                job.exception()

        job = asyncio.create_task(self._run(content))
        self._jobs.add(job)
        job.add_done_callback(ended)
        return job

    async def _run(self, content: bytes) -> bytes:
        for _ in range(CHILDREN):
            try:
                return await self._children.run(RENDER, content, self._job_s)
            # The child was killed from outside, so the job is not at fault and is tried again. All other children may
            # have been killed at the same time.
            except JobLostError:
                continue
        return await self._children.run(RENDER, content, self._job_s)


@asynccontextmanager
async def rendering(template: ChatTemplate | None, max_waiting: int) -> AsyncGenerator[Renderer | None, None]:
    """A renderer and its child processes, which may still be starting. None if the model has no template."""
    if template is None:
        yield None
        return
    children = children_of(template)
    children.start()
    try:
        yield Renderer(template, children, max_waiting)
    finally:
        await children.close()


def _reason(error: JobError) -> str:
    if isinstance(error, JobTimeoutError):
        return f"it takes more than {MAX_RENDER_S:.0f} s"
    if isinstance(error, JobFailedError):
        return error.reason
    return "its process was lost"
