import json
import os

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from text_generation_router.errors import StartError
from text_generation_router.text.templates.chat_template import Conversation, Message
from text_generation_router.text.templates.files import load_chat_template

USER = Conversation((Message("user", "Hi"),))
WITH_TOOLS = Conversation(USER.messages, tools=({},))


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_sources_are_taken_in_order(tmp_path):
    assert load_chat_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "config"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert load_chat_template(tmp_path).render(USER) == "config"
    assert load_chat_template(tmp_path).render(WITH_TOOLS) == "tools"
    write(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert load_chat_template(tmp_path).render(WITH_TOOLS) == "json"
    write(tmp_path, "chat_template.jinja", "jinja")
    assert load_chat_template(tmp_path).render(USER) == "jinja"
    write(tmp_path, "mine.json", {"chat_template": "mine"})
    assert load_chat_template(tmp_path, str(tmp_path / "mine.json")).render(USER) == "mine"


def test_additional_templates_are_files_of_a_folder(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    write(tmp_path / "additional_chat_templates", "tool_use.jinja", "tools")
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config"})
    loaded = load_chat_template(tmp_path)
    assert (loaded.render(USER), loaded.render(WITH_TOOLS)) == ("config", "tools")
    write(tmp_path, "chat_template.jinja", "jinja")
    assert load_chat_template(tmp_path).render(USER) == "jinja"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools, conversation in ((None, USER), ([{}], WITH_TOOLS)):
        expected = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tools=tools, tokenize=False)
        assert load_chat_template(tmp_path).render(conversation) == expected


TOKENS = {
    "bos_token": {"__type": "AddedToken", "content": "<s>"},
    "eos_token": None,
    "pad_token": "<pad>",
    "image_token": "<image>",
    "add_bos_token": True,
    "extra_special_tokens": {"audio_token": "<audio>"},
}


@pytest.mark.parametrize("is_new", [False, True])
def test_special_tokens_are_those_of_transformers(tmp_path, is_new):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    names = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "audio", "add_bos")
    template = "|".join(f"{{{{ {name}_token }}}}" for name in names)
    config = TOKENS | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    write(tmp_path, "tokenizer_config.json", config | ({"added_tokens_decoder": {}} if is_new else {}))
    write(tmp_path, "special_tokens_map.json", {"eos_token": {"content": "</s>"}, "sep_token": "<sep>"})
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert load_chat_template(tmp_path).render(USER) == expected
    assert ("</s>" in expected) is not is_new


def test_broken_files_are_named_at_start(tmp_path):
    write(tmp_path, "tokenizer_config.json", {"chat_template": "{% if %}"})
    with pytest.raises(StartError, match="not valid Jinja"):
        load_chat_template(tmp_path)
    write(tmp_path, "tokenizer_config.json", "{")
    with pytest.raises(StartError, match=r"tokenizer_config\.json is not valid JSON"):
        load_chat_template(tmp_path)
    with pytest.raises(StartError, match=r"nowhere\.json is not a file: check the path"):
        load_chat_template(tmp_path, str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize(
    "name", ["chat_template.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
)
def test_files_that_are_too_large_are_refused_unread(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(10**10)  # a sparse file: takes no disk space
    with pytest.raises(StartError, match="larger than 8 MiB") as refused:
        load_chat_template(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["chat_template.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
)
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
