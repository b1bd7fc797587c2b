import json
from pathlib import Path

import pytest

from text_generation_router.errors import TemplateError
from text_generation_router.text.templates.chat_template import ChatTemplate, Conversation, Message
from text_generation_router.text.templates.facts import facts_of
from text_generation_router.text.templates.jinja_template import TemplateEnvironment

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

HI = (Message("user", "Hi"),)


def render(source, messages=HI, **tokens):
    return ChatTemplate(source, tokens).render(Conversation(tuple(messages)))


def test_template_sees_messages_tokens_and_the_prompt_flag():
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    assert render(source, bos_token="<s>", eos_token="</s>") == "<s>user: Hi</s>A:"


def test_blocks_leave_no_blank_lines():
    assert render("{% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_transformers_functions_filters_and_tags_are_there():
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}\nx{% endgeneration %}") == "x"
    assert render("{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}") == "21"
    assert render("{{ dict(a=1) }}{{ dict.fromkeys('ab', 1) }}") == "{'a': 1}{'a': 1, 'b': 1}"
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ 'ab'.upper()[::-1] }}") == "2BA"


def test_a_refusal_of_the_template_is_told_in_its_words_and_an_error_with_its_line():
    with pytest.raises(TemplateError) as caught:
        render("a\n{{ raise_exception('only two') }}")
    assert caught.value.text == "Template error: the model's chat template refuses the conversation: only two"
    with pytest.raises(TemplateError, match=r"invalid operation: ZeroDivisionError: .* \(in <string>:2\)"):
        render("a\n{{ 1 / 0 }}")


def test_the_template_that_shows_all_system_messages_where_they_stand_gets_them_there():
    system, later = Message("system", "same"), Message("developer", "same")
    each = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert render(each, (system, *HI, later)) == "[system]same[user]Hi[system]same"
    first = (
        "[{{ messages[0].role }}]{{ messages[0].content }}{% for m in messages[1:] if m.role == 'user' %}{% endfor %}"
    )
    assert render(first, (system, *HI, later)) == "[system]same\n\nsame"
    strict = "{% if messages[1:] | selectattr('role', 'eq', 'system') | list %}{{ raise_exception('no') }}{% endif %}"
    assert render(strict + each, (*HI, later)) == "[system]same[user]Hi"
    with pytest.raises(TemplateError, match="refuses the conversation: no"):
        render("{{ raise_exception('no') }}", (*HI, later))


@pytest.mark.parametrize("source", TABLES["hostile"])
def test_hostile_or_broken_templates_are_errors_and_nothing_else(source):
    with pytest.raises(TemplateError):
        render(source)


def test_the_assistants_last_message_is_continued():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}[assistant]"
    messages = (Message("user", "a b"), Message("assistant", "so far "))
    assert render(source, messages) == "[user]a b[end][assistant]so far"


def test_spaces_before_the_continuation_stay_if_the_template_keeps_them():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    messages = (Message("user", "a b"), Message("assistant", "so far "))
    assert render(source, messages) == "[user]a b[end][assistant]so far "


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}", "<think>Hm.</think>So"),
        ("{{ messages[0].content }}", "so far"),
        ("{{ messages | length }}{{ messages[-1].content }}", None),
    ],
)
def test_a_message_that_the_template_does_not_show_is_not_continued(source, content):
    conversation = Conversation((*HI, Message("assistant", content)), continue_final_message=True)
    with pytest.raises(TemplateError, match="continued"):
        ChatTemplate(source, {}).render(conversation)


def test_an_assistants_message_without_text_is_answered():
    source = "{{ messages | length }}{% if add_generation_prompt %}A:{% endif %}"
    assert render(source, (*HI, Message("assistant", "", {"tool_calls": []}))) == "2A:"


def test_what_the_client_sends_besides_messages_has_transformers_names_and_values():
    source = (
        "{{ tools | tojson }}|{{ documents[0].title }}|{{ messages[0].thinking }}|{{ messages[0].reasoning_content }}|"
        "{{ bos_token }}|{{ x }}|{{ messages[0] | list }}"
    )
    conversation = Conversation(
        (Message("user", "Hi", {"reasoning": "Hm"}),),
        variables={"x": 1, "bos_token": "mine", "messages": "theirs"},
        tools=({"type": "function"},),
        documents=({"title": "T"},),
    )
    keys = "['thinking', 'role', 'content', 'reasoning', 'reasoning_content']"
    expected = '[{"type": "function"}]|T|Hm|Hm|mine|1|' + keys
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(conversation) == expected
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


def test_tools_and_documents_choose_their_templates():
    named = {"tool_use": "tools: {{ tools | length }}", "rag": "{{ documents | length }} documents", "other": "{{"}
    template = ChatTemplate("plain", {}, named)
    assert template.render(Conversation(HI)) == "plain"
    assert template.render(Conversation(HI, tools=({},) * 2)) == "tools: 2"
    assert template.render(Conversation(HI, documents=({},) * 3)) == "3 documents"
    assert ChatTemplate(*template.setup).render(Conversation(HI, tools=({},))) == "tools: 1"
    assert template.uses_tools and (template.source(), template.source(with_tools=True)) == ("plain", named["tool_use"])
    assert ChatTemplate("{% if tools %}{% endif %}", {}).uses_tools
    assert not ChatTemplate("tools {{ 'tools' }}", {}).uses_tools


def test_documents_without_a_place_in_the_template_are_refused():
    with pytest.raises(TemplateError, match="no place for `documents`"):
        ChatTemplate("{{ messages[0].content }}", {}).render(Conversation(HI, documents=({},)))


LOOP = "{% for part in message.content %}{{ part.text }}{% endfor %}"
MACRO = "{% macro show(content) %}" + LOOP.replace("message.", "") + "{% endmacro %}{{ show(messages[0]['content']) }}"


@pytest.mark.parametrize(
    ("source", "takes_parts", "takes_texts"),
    [
        ("{{ messages[0].content }}", False, True),
        ("{% for message in messages %}" + LOOP + "{% endfor %}", True, False),
        (
            "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
            + LOOP
            + "{% endif %}{% endfor %}",
            True,
            True,
        ),
        (MACRO, True, False),
        (
            MACRO.replace("{% for", "{% if content is not string %}{% for").replace(
                "{% endmacro", "{% endif %}{% endmacro"
            ),
            True,
            True,
        ),
        (
            "{% set c = messages[0].get('content') %}{% for p in c | selectattr('type') %}{{ p.x }}{% endfor %}",
            True,
            False,
        ),
        ("{% for word in messages[0].content.split() %}{{ word }}{% endfor %}", False, True),
    ],
)
def test_content_comes_as_a_text_or_as_parts_if_the_template_takes_it(source, takes_parts, takes_texts):
    facts = facts_of(TemplateEnvironment().parse(source))
    assert (facts.takes_parts, facts.takes_texts) == (takes_parts, takes_texts)


def test_parts_are_joined_for_a_template_without_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", (Message("user", parts),)) == "ab"
    looped = "{% for m in messages %}" + LOOP.replace("message", "m").replace("}}", "}};") + "{% endfor %}"
    assert render(looped, (Message("user", parts), Message("user", "c"))) == "a;b;c;"
    assert render(looped, (Message("user", "c"), Message("assistant", parts))) == "c;a;b"


def test_calls_without_content_have_none_only_for_a_template_that_looks_for_it():
    call = (*HI, Message("assistant", None, {"tool_calls": []}))
    calls = "{{ messages[1].tool_calls | length }}"
    is_none = "messages[1].content is none"
    assert render(calls + "{{ " + is_none + " }}", call) == "0True"
    assert render(calls + "{{ (" + is_none + " or messages[1].content == '') and messages[1].content }}", call) == "0"
    assert render("{{ " + is_none + " }}", call) == "False"
    assert render("{{ '[' + messages[1]['content'] + ']' }}", call) == "[]"
    assert render("[" + LOOP.replace("message", "messages[1]") + "]", call) == "[]"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ call.arguments | tojson }}", '{"°": 1}'),
        ("{% for name, value in call.arguments.items() %}{{ name }}{% endfor %}", "°"),
        ("{{ 'f ' + call['arguments'] }}", 'f {"°": 1}'),
        ("{% set given = call.arguments %}{{ given + '' }}", '{"°": 1}'),
        ("{{ call.arguments + '' if call.arguments is string else 'an object' }}", "an object"),
        ("{% set a = call.arguments | tojson %}{{ 'f ' + a }}", 'f {"°": 1}'),
    ],
)
def test_arguments_are_objects_unless_the_template_takes_them_for_texts(source, shown):
    call = {"type": "function", "function": {"name": "f", "arguments": {"°": 1}}}
    messages = (*HI, Message("assistant", "", {"tool_calls": [call]}))
    assert render("{% set call = messages[1].tool_calls[0].function %}" + source, messages) == shown
    assert call["function"]["arguments"] == {"°": 1}
