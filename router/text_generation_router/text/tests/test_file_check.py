"""The check of a model's files beside a server's start finds what the router would find seconds later, and is light."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from text_generation_common.errors import WeightsError
from text_generation_common.weights.child import run_child
from text_generation_router.errors import StartError
from text_generation_router.text.templates.files import load_chat_template
from text_generation_router.text.tokens.tokenization import TextTokenizer

MODULE = "text_generation_router.text.templates.file_check"
GOOD = {"tokenizer.json": Tokenizer(models.WordLevel({"a": 0}, "a")).to_str()}
SYNTAX, FILTER = "{% if %}", "{{ messages | nofilter }}"
# Rust code panics: the prefix, which merges lack, is longer than the second part of the merge.
PANIC = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "###"}
FOLDERS = {
    "no template": {},
    "a template": {"chat_template.jinja": "{% generation %}{{ messages[0] }}{% endgeneration %}"},
    "no tokenizer": {"tokenizer.json": "{}"},
    "not JSON": {"tokenizer.json": "{x}"},
    "a panic": {"tokenizer.json": json.dumps({"version": "1.0", "model": PANIC})},
    "an unknown model": {"tokenizer.json": json.dumps({"version": "1.0", "model": {"type": "X"}})},
    "a config's template": {"tokenizer_config.json": json.dumps({"chat_template": SYNTAX})},
    "a named template": {
        "tokenizer_config.json": json.dumps(
            {"chat_template": [{"name": "default", "template": ""}, {"name": "tool_use", "template": FILTER}]}
        )
    },
    "a processor's template": {"chat_template.json": json.dumps({"chat_template": FILTER})},
    "a template's file": {"chat_template.jinja": "a\n" + SYNTAX},
    "another template's file": {"chat_template.jinja": "", "additional_chat_templates/rag.jinja": SYNTAX},
    "a broken config": {"tokenizer_config.json": "{"},
}


def of_router(folder: Path, config: str | None) -> str:
    try:
        if (template := load_chat_template(folder, config)) is not None:
            template.compile()
        TextTokenizer.load(folder, workers=1, max_waiting=1).close()
    except StartError as error:
        return str(error)
    return ""


def of_check(folder: Path, *config: str) -> str:
    try:
        run_child(MODULE, str(folder), *config)
    except WeightsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FOLDERS)
def test_the_verdict_is_the_router_s(tmp_path: Path, name: str) -> None:
    for file, content in (GOOD | FOLDERS[name]).items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    told = of_check(tmp_path)
    assert told == of_router(tmp_path, None)
    assert bool(told) == (name not in ("no template", "a template")) and "Exception" not in told


def test_a_template_that_a_flag_names_is_checked_in_place_of_the_model_s(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(GOOD["tokenizer.json"])
    (tmp_path / "chat_template.jinja").write_text(SYNTAX)
    config = tmp_path / "other.json"
    for template, is_refused in (("{{ messages }}", False), (FILTER, True)):
        config.write_text(json.dumps({"chat_template": template}))
        told = of_check(tmp_path, str(config))
        assert told == of_router(tmp_path, str(config)) and bool(told) == is_refused


def test_nothing_heavy_is_loaded() -> None:
    script = f"import sys, {MODULE}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    assert "jinja2" in roots
    assert not roots & {"torch", "transformers", "numpy", "grpc", "uvicorn", "starlette", "pydantic", "typer"}
