import json
import os

import pytest

from text_generation_router.errors import StartError, TemplateError
from text_generation_router.text.chat_template import ChatTemplate, Conversation, Message, load_chat_template

HI = (Message("user", "Hi"),)
USER = Conversation(HI)


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
    assert render("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ 'ab'.upper()[::-1] }}") == "2BA"


def test_an_error_raised_by_the_template_names_its_line():
    with pytest.raises(TemplateError) as caught:
        render("a\n{{ raise_exception('only two') }}")
    assert caught.value.text == "Template error: syntax error: only two (in <string>:2)"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 99999 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_hostile_or_broken_templates_are_errors_and_nothing_else(source):
    with pytest.raises(TemplateError):
        render(source)


def test_the_assistants_last_message_is_continued():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}[assistant]"
    messages = (Message("user", "a b"), Message("assistant", "so far "))
    assert render(source, messages) == "[user]a b[end][assistant]so far"


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_sources_are_taken_in_order(tmp_path):
    assert load_chat_template(tmp_path) is None
    write(tmp_path, "chat_template.jinja", "jinja")
    assert load_chat_template(tmp_path).render(USER) == "jinja"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "config"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert load_chat_template(tmp_path).render(USER) == "config"
    write(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert load_chat_template(tmp_path).render(USER) == "json"
    write(tmp_path, "mine.json", {"chat_template": "mine"})
    assert load_chat_template(tmp_path, str(tmp_path / "mine.json")).render(USER) == "mine"


def test_special_tokens_are_strings_or_objects(tmp_path):
    config = {"chat_template": "{{ bos_token }}|{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": None}
    write(tmp_path, "tokenizer_config.json", config)
    assert load_chat_template(tmp_path).render(USER) == "<s>|"


def test_broken_files_are_named_at_start(tmp_path):
    write(tmp_path, "tokenizer_config.json", {"chat_template": "{% if %}"})
    with pytest.raises(StartError, match="not valid Jinja"):
        load_chat_template(tmp_path)
    write(tmp_path, "tokenizer_config.json", "{")
    with pytest.raises(StartError, match=r"tokenizer_config\.json is not valid JSON"):
        load_chat_template(tmp_path)
    with pytest.raises(StartError, match=r"nowhere\.json is not a file: check the path"):
        load_chat_template(tmp_path, str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize("name", ["chat_template.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_that_are_too_large_are_refused_unread(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(10**10)  # a sparse file: takes no disk space
    with pytest.raises(StartError, match="larger than 8 MiB") as refused:
        load_chat_template(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["chat_template.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(StartError, match=rf"{name} cannot be read \(not a regular file\)"):
        load_chat_template(tmp_path)


def test_a_template_that_is_not_text_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(StartError, match=r"chat_template\.jinja is not UTF-8"):
        load_chat_template(tmp_path)


def test_list_entries_that_are_not_named_templates_are_skipped(tmp_path):
    named = [None, 1, "default", {"name": "default", "template": "x"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_chat_template(tmp_path).render(USER) == "x"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [None]}))
    assert load_chat_template(tmp_path) is None
