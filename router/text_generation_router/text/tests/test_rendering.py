"""Rendering chats in real child processes."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from transformers.utils.chat_template_utils import render_jinja_template

from text_generation_router.errors import StartError, TemplateError
from text_generation_router.offload.process import CHILD
from text_generation_router.scheduling.request import Share
from text_generation_router.text.templates.chat_template import ChatTemplate, Conversation, Message
from text_generation_router.text.templates.rendering import Renderer, children_of

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

ORDINARY = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<assistant>"
# A statement without effect that makes the cost of a template unknown.
UNKNOWN = "{% set unused %}{% endset %}"
USER, EVIL = (Conversation((Message("user", text),)) for text in (" Hi 😀", "evil"))
TWICE = Conversation(USER.messages * 2)
# Seconds after which jobs that never end are killed. Other jobs end by themselves or at the memory limit, which takes
# longer on a busy machine.
JOB_S = 3.0
A, B = Share("a"), Share("b")

HUGE = 10**9
# Numbers of parts that never end nor need memory, and the seconds after which these are killed.
ENDLESS, ENDLESS_S = {0, 1, 10, 14}, 1.0
EVIL_PARTS = [
    "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    *TABLES["evil_parts"],
    *(f"{{{{ 'x'.{name}({HUGE}) }}}}" for name in ("ljust", "rjust", "center", "zfill")),
]


def run(
    source: str,
    test: Callable[[Renderer], Awaitable[Any]],
    tokens: dict[str, str] | None = None,
    job_s: float = JOB_S,
    limit_s: float = 60,
) -> Any:
    async def rendered() -> Any:
        template = ChatTemplate(source, tokens or {})
        children = children_of(template)
        renderer = Renderer(template, children, max_waiting=64, job_s=job_s)
        children.start()
        try:
            await renderer.check()
            async with asyncio.timeout(limit_s):
                return await test(renderer)
        finally:
            await children.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(rendered())


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_prompts_and_errors_are_the_templates():
    source = (
        UNKNOWN
        + "{{ bos_token }}"
        + ORDINARY
        + "{% if messages|length > 1 %}{{ raise_exception('only one') }}{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})

    async def test(renderer: Renderer) -> None:
        assert await renderer.render(USER, A) == template.render(USER) == "<s><user>Hi 😀<assistant>"
        with pytest.raises(TemplateError) as expected:
            template.render(TWICE)
        with pytest.raises(TemplateError) as caught:
            await renderer.render(TWICE, A)
        assert caught.value.text == expected.value.text

    run(source, test, {"bos_token": "<s>"})


# Templates in the style of ChatML, Llama 2, Llama 3 and Zephyr.
TEMPLATES = [
    *TABLES["templates"],
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
]
CHATS = [
    [("user", "Hi")],
    [
        ("system", "Be brief. "),
        ("user", " é😀 <b>&amp;</b> \n\n"),
        ("assistant", "so\tfar"),
        ("user", "{{ messages }} {% raw %}"),
    ],
    [("user", str(number)) for number in range(9)],
]


@pytest.mark.parametrize("unknown", [False, True], ids=["here", "in a child"])
@pytest.mark.parametrize("source", TEMPLATES, ids=["ChatML", "Llama 2", "Llama 3", "Zephyr"])
def test_prompts_are_those_of_transformers(source, unknown):
    source = UNKNOWN * unknown + source
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}

    async def test(renderer: Renderer) -> None:
        for chat in CHATS:
            conversation = Conversation(tuple(Message(*message) for message in chat))
            assert ChatTemplate(source, tokens).is_cheap(conversation) is not unknown
            messages = [{"role": role, "content": content} for role, content in chat]
            [[expected], _] = render_jinja_template(
                [messages], None, None, source, add_generation_prompt=True, **tokens
            )
            assert await renderer.render(conversation, A) == expected

    run(source, test, tokens)


def test_whatever_a_template_does_it_is_stopped():
    """A chat that triggers a hostile part gets an error, the next chat gets its prompt, and the router's peak memory
    does not grow. One template has all parts, because children that render it take longer to start than most parts."""
    # Alone, no part makes its template one that the router itself renders.
    assert not [part for part in EVIL_PARTS if ChatTemplate(part + ORDINARY, {}).is_cheap(USER)]
    # A macro has a name of its own.
    named = (part.replace("again", f"again_{number}") for number, part in enumerate(EVIL_PARTS))
    parts = (f"{{% if messages[0].content == 'evil {n}' %}}{part}{{% endif %}}" for n, part in enumerate(named))

    async def test(renderer: Renderer) -> None:
        for number, part in enumerate(EVIL_PARTS):
            before = peak_bytes() if sys.platform == "linux" else 0
            renderer._job_s = ENDLESS_S if number in ENDLESS else JOB_S
            with pytest.raises(TemplateError):
                print(part, await renderer.render(Conversation((Message("user", f"evil {number}"),)), A))
            renderer._job_s = JOB_S
            assert await renderer.render(USER, A) == "<user>Hi 😀<assistant>", part
            if sys.platform == "linux":
                assert peak_bytes() - before < 16 * 2**20, part

    run("".join(parts) + ORDINARY, test, limit_s=20 * JOB_S)


def test_constant_expressions_are_not_evaluated_in_the_router():
    before = peak_bytes() if sys.platform == "linux" else 0
    run("{{ '%1000000000d' % 1 }}{{ 'x'.ljust(1000000000) }}" + ORDINARY, lambda renderer: asyncio.sleep(0))
    if sys.platform == "linux":
        assert peak_bytes() - before < 16 * 2**20


def test_one_owners_endless_chats_do_not_delay_other_owners():
    source = "{% if messages[0].content == 'evil' %}" + EVIL_PARTS[0] + "{% endif %}" + ORDINARY

    async def test(renderer: Renderer) -> None:
        evil = [asyncio.create_task(renderer.render(EVIL, Share("a", str(tenant)))) for tenant in range(6)]
        await asyncio.sleep(0)
        for _ in range(10):
            assert await renderer.render(USER, B) == "<user>Hi 😀<assistant>"
        assert not any(task.done() for task in evil)
        for task in evil:
            task.cancel()
        await asyncio.gather(*evil, return_exceptions=True)

    run(source, test, job_s=60)


def test_cancelled_endless_chats_of_one_owner_do_not_delay_other_owners():
    source = "{% if messages[0].content == 'evil' %}" + EVIL_PARTS[0] + "{% endif %}" + ORDINARY

    async def test(renderer: Renderer) -> None:
        for _ in range(4):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await renderer.render(EVIL, A)
        assert len(renderer._jobs) == 1
        assert await renderer.render(USER, B) == "<user>Hi 😀<assistant>"

    run(source, test, job_s=60)


def test_a_chat_whose_child_is_killed_is_rendered_by_another():
    async def test(renderer: Renderer) -> None:
        for pid in child_pids():
            os.kill(pid, signal.SIGKILL)
        assert await renderer.render(USER, A) == "<user>Hi 😀<assistant>"

    run(UNKNOWN + ORDINARY, test)


def child_pids() -> list[int]:
    """Process ids of the pool's children. Other children, such as multiprocessing's resource tracker, come from other
    tests and are left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_ours = CHILD.encode() in (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == os.getpid() and is_ours:
            found.append(int(folder.name))
    return found


def test_a_template_that_cannot_be_compiled_stops_the_start():
    async def nothing(_: Renderer) -> None: ...

    with pytest.raises(StartError, match=r"not valid Jinja: No filter named 'absent'"):
        run("{{ messages | absent }}", nothing)
