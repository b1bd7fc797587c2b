"""Templates make the same prompts as with transformers: small ones, and those of real models that `make
fetch-templates` fetches."""

import re
from pathlib import Path

import pytest
from transformers.utils import chat_template_utils

from text_generation_router.errors import TemplateError
from text_generation_router.text.templates import jinja_template
from text_generation_router.text.templates.chat_template import ChatTemplate
from text_generation_router.text.templates.facts import facts_of
from text_generation_router.text.templates.jinja_template import TemplateEnvironment
from text_generation_router.text.tests.chats import CHATS, TOKENS, Chat, FixedTime, message
from text_generation_router.text.tests.fetch_templates import FOLDER

ERROR = "an error"
# Templates in the styles of the families of docs/models.md that have chat models.
OURS = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
FETCHED = sorted(FOLDER.glob("*/*.jinja"))


@pytest.fixture(autouse=True)
def _fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", FixedTime)
    monkeypatch.setattr(jinja_template, "datetime", FixedTime)


def by_transformers(source: str, chat: Chat) -> str:
    try:
        return chat.by_transformers(source)
    except Exception:  # whatever the template raises
        return ERROR


def by_us(template: ChatTemplate, chat: Chat) -> str:
    try:
        return template.render(chat.conversation())
    except TemplateError:
        return ERROR


def shows_its_text(source: str, chat: Chat) -> bool:
    text = by_transformers(source, chat)
    return "Besançon" in text and "'text'" not in text and '"text"' not in text


def in_form(source: str, chat: Chat) -> Chat:
    """The chat with its contents in the form that the template takes: as they are, unless only the other form shows
    them."""
    probe, other = CHATS["plain"], Chat.in_parts
    if chat is CHATS["parts"]:
        probe, other = chat, Chat.in_texts
    return other(chat) if not shows_its_text(source, probe) and shows_its_text(source, other(probe)) else chat


def wanted(source: str, chat: Chat) -> str:
    """The prompt by transformers, of a chat in the form that the template takes."""
    text = by_transformers(source, in_form(source, chat))
    # Some templates of DeepSeek's add arguments to texts, which is an error if they are objects.
    return text if text != ERROR else by_transformers(source, in_form(source, chat).with_texts())


SYSTEM, LATER, DEVELOPER = (
    message("system", "Be kind."),
    message("system", "Be quick."),
    message("developer", "Be brief."),
)
ASKED, ANSWERED, NEXT = message("user", "1 + 1?"), message("assistant", "2"), message("user", "2 + 2?")
ORDERS = {
    "a developer": [DEVELOPER, ASKED],
    "a system and a developer": [SYSTEM, DEVELOPER, ASKED],
    "two": [SYSTEM, LATER, ASKED],
    "one later": [ASKED, ANSWERED, LATER, NEXT],
    "one more later": [SYSTEM, ASKED, ANSWERED, LATER, NEXT],
    "one last": [SYSTEM, ASKED, LATER],
}


def check_orders(path: Path) -> None:
    """A template that shows the text of one system message at the beginning shows those of all, wherever they stand,
    and once. A template that shows them all where they stand gets them there."""
    source = path.read_text()
    template = ChatTemplate(source, TOKENS)
    if "Be kind." not in by_us(template, Chat([SYSTEM, ASKED])):
        return
    for name, messages in ORDERS.items():
        texts = [sent["content"] for sent in messages if sent["role"] in ("system", "developer")]
        as_it_is, prompt = wanted(source, Chat(messages)), by_us(template, Chat(messages))
        assert [prompt.count(text) for text in texts] == [1] * len(texts), (name, prompt)
        if DEVELOPER not in messages and all(as_it_is.count(text) == 1 for text in texts):
            assert prompt == as_it_is, name


def compare(path: Path) -> None:
    source = path.read_text()
    template = ChatTemplate(source, TOKENS)
    takes_none = facts_of(TemplateEnvironment().parse(source)).takes_none
    names_developer, different = bool(re.search("['\"]developer['\"]", source)), []
    for name, chat in CHATS.items():
        expected, given = wanted(source, chat), by_us(template, chat)
        if chat.documents and "documents" not in source:
            expected = ERROR  # transformers renders such a chat without its documents
        if name == "call without content" and given != expected:
            # Transformers leaves the content out. Here it is empty, unless the template looks for null.
            expected = given if takes_none else wanted(source, CHATS["call"])
        if name == "developer" and not (names_developer and "Be brief." in expected):
            expected = wanted(source, CHATS["brief system"])
        if given != expected:
            different.append(name)
    assert not different


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_prompts_of_small_templates_are_those_of_transformers(path: Path) -> None:
    compare(path)
    check_orders(path)


@pytest.mark.skipif(not FETCHED, reason="no templates in .templates/: `make fetch-templates` fetches them")
@pytest.mark.parametrize("path", FETCHED or [FOLDER], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_prompts_of_real_templates_are_those_of_transformers(path: Path) -> None:
    compare(path)
    check_orders(path)
