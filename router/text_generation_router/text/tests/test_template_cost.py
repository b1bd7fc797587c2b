import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from text_generation_common.tests.examples import examples
from text_generation_router.text.templates.chat_template import (
    MAX_CHEAP_CHARS,
    MESSAGE_CHARS,
    ChatTemplate,
    Conversation,
    Message,
)
from text_generation_router.text.templates.cost import cost_of
from text_generation_router.text.templates.jinja_template import TemplateEnvironment
from text_generation_router.text.tests.test_rendering import EVIL_PARTS, TEMPLATES

TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())

USER = Message("user", "x" * 50)


def cost(source: str):
    return cost_of(TemplateEnvironment().parse(source))


@pytest.mark.parametrize("source", TEMPLATES)
def test_ten_messages_of_an_ordinary_template_are_cheap_and_many_are_not(source):
    template = ChatTemplate(source, {})
    assert template.is_cheap(Conversation((USER,) * 10))
    assert not template.is_cheap(Conversation((USER,) * 20_000))
    assert not template.is_cheap(Conversation((Message("user", "x" * MAX_CHEAP_CHARS),)))


@pytest.mark.parametrize(
    "source",
    [
        *EVIL_PARTS,
        # Templates with values that grow from one iteration of a loop to the next.
        "{% set ns = namespace(x='x') %}{% for m in messages %}{% set y = ns.x %}{% set ns.x = y + y %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% set o = namespace() %}{% set o.x = ns.x + ns.x %}",
        "{% set ns = namespace(x='x') %}{% set ns = namespace(x=ns.x + ns.x) %}",
        # Templates with loops over values other than messages.
        "{% for c in messages[0].content %}{% endfor %}",
        "{% if x %}{% set a = 'x' %}{% else %}{% set a = messages %}{% endif %}{% for c in a %}{% endfor %}",
        "{% if x %}{% set a = messages %}{% else %}{% set a = 'x' %}{% endif %}{% for c in a %}{% endfor %}",
        "{% for messages in messages %}{% for c in messages %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}",
        # Templates that store methods and functions under other names.
        "{% set ns = namespace(split='x'.ljust) %}{{ ns.split(1000000000) }}",
        "{% set ns = namespace(split='x'['ljust']) %}{{ ns.split(1000000000) }}",
        "{% set name = 'lju' %}{% set ns = namespace(split='x'[name + 'st']) %}{{ ns.split(1000000000) }}",
        "{% set ns = namespace(split=lipsum) %}{{ ns.split(1000000000) }}",
        "{% for m in messages %}{% set ns = namespace(split=loop.cycle) %}{{ ns.split('x') }}{% endfor %}",
        "{% set l = 'x'.ljust %}{{ l(1000000000) }}",
        # Templates that format with a huge width.
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' is odd }}",
        "{% set loop = {'index': '%1000000000d'} %}{{ loop.index % 1 }}",
        "{{ strftime_now('%1000000000Y') }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ 'x' | trim('x') }}",
        "{% set x %}{{ messages }}{% endset %}",
        "{% filter upper %}{{ messages }}{% endfilter %}",
        "{% include 'x' %}",
    ],
)
def test_a_template_with_unknown_syntax_has_no_bound(source):
    assert cost(source) is None


LOOPS_OVER_WORDS = "{% for word in messages[0].content.split() %}{% endfor %}"  # has no bound


@pytest.mark.parametrize("test", TABLES["never"])
def test_branches_for_what_no_plain_chat_has_cost_nothing(test):
    assert cost(f"{{% if {test} %}}{LOOPS_OVER_WORDS}{{% endif %}}") is not None
    assert cost(f"{{% if {test} %}}{{% else %}}{LOOPS_OVER_WORDS}{{% endif %}}") is None
    assert cost(f"{{% if {test} %}}{{% elif x %}}{LOOPS_OVER_WORDS}{{% endif %}}") is None


@pytest.mark.parametrize("source", TABLES["counted"])
def test_a_branch_that_a_plain_chat_may_take_is_counted(source):
    assert cost(source.replace("?", "")) is not None
    assert cost(source.replace("?", LOOPS_OVER_WORDS)) is None


@pytest.mark.parametrize(
    "source",
    [
        "{% macro evil() %}?{% endmacro %}{% if tools %}{{ evil() }}{% endif %}",
        "{% for call in messages[0].tool_calls %}?{% endfor %}",
        "{% if tools is not defined %}{% set tools = none %}{% endif %}{% for tool in tools %}?{% endfor %}",
        "{{ (messages[0].content.split() if tools else 'x') and tools and messages[0].content.split() }}",
        "{% set ns = namespace(at=-1) %}{% set ns.at = (messages | length - 1) - 1 %}{{ messages[::-1][0].content }}",
        "{{ messages[0].content.split('</think>')[-1].lstrip('\\n') }}",
        "{{ date | default(strftime_now('%d %b %-m')) }}{% if strftime_now is defined %}{% endif %}",
    ],
)
def test_what_a_plain_chat_does_not_reach_and_short_steps_have_a_bound(source):
    assert cost(source.replace("?", LOOPS_OVER_WORDS)) is not None


@pytest.mark.parametrize("source", TABLES["unbounded"])
def test_macros_that_are_used_and_steps_of_any_length_have_no_bound(source):
    assert cost(source) is None


def test_constants_in_branches_that_are_not_taken_are_not_evaluated():
    """Otherwise compiling would evaluate them in the router: 300 MB each, for seconds."""
    evil = "{{ '%300000000d' % 1 }}{{ 'x' | center(300000000) }}{% set x = 'x'.ljust(300000000) %}"
    chat = Conversation((USER,))
    for source in (f"{{% if tools %}}{evil}{{% endif %}}", f"{{% macro unused() %}}{evil}{{% endmacro %}}"):
        template = ChatTemplate(source + "{{ messages[0].role }}", {})
        assert template.is_cheap(chat)
        tracemalloc.start()
        assert template.render(chat) == "user"
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 * 2**20


def test_doubling_is_counted():
    assert cost("{% set a = 'x' %}" + "{% set a = a + a %}" * 40).of(1, 1) > 2**40


TEXTS = st.text(max_size=8) | st.sampled_from(["\U000e0001", "\x00", "'\"", "ΐ"])
EXPRESSIONS = st.recursive(
    st.sampled_from(["messages", "messages[0]", "messages[-1].content", "bos_token", "'lit'", "a", "b", "ns.x"]),
    lambda inner: st.one_of(
        st.builds("({} + {})".format, inner, inner),
        st.builds("({} ~ {})".format, inner, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("({} | {})".format, inner, st.sampled_from(["trim", "string", "tojson", "upper", "length", "last"])),
        st.builds("({}).{}".format, inner, st.sampled_from(["strip()", "split('i')", "upper()", "content"])),
        st.builds("({})[1:]".format, inner),
    ),
    max_leaves=8,
)


@examples(300)
@given(
    first=EXPRESSIONS,
    second=EXPRESSIONS,
    shown=EXPRESSIONS,
    chat=st.lists(st.builds(Message, TEXTS, TEXTS), min_size=1, max_size=4),
)
def test_no_prompt_is_larger_than_the_bound(first, second, shown, chat):
    source = (
        "{% set ns = namespace(x='y') %}{% set a = " + first + " %}{% for b in messages %}{% set a = a ~ b.content %}"
        "{% set b2 = " + second + " %}{{ b2 }}{{ " + shown + " }}{% endfor %}{{ " + shown + " }}"
    )
    bound = cost(source)
    if bound is None:
        return
    variables = [{"role": message.role, "content": message.content} for message in chat]
    unit = len(source) + sum(len(m.role) + len(m.content) + MESSAGE_CHARS for m in chat)
    try:
        text = TemplateEnvironment().from_string(source).render(messages=variables, bos_token="<s>")
    except (TypeError, UndefinedError):
        return  # the generated template adds a number to a text
    assert len(text) <= bound.of(len(chat), unit)
