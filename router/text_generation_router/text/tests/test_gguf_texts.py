"""Tokenizer, chat templates and defaults of a GGUF file, read as those of a folder are."""

import pytest
from gguf_headers import PIECES
from gguf_writer import write_gguf

from text_generation_common.errors import WeightsError
from text_generation_common.weights.child import run_child
from text_generation_router.errors import StartError
from text_generation_router.text.model_files import find_model_files, read_defaults
from text_generation_router.text.templates import file_check
from text_generation_router.text.templates.files import load_chat_template
from text_generation_router.text.tokens.tokenization import TextTokenizer

TEXT, ARRAY, FLOAT, WHOLE = 8, 9, 6, 5


@pytest.fixture
def write(tmp_path):
    def write(**others):
        texts, scores, kinds = map(list, zip(*PIECES, strict=True))
        keys = {
            "tokenizer.ggml.model": (TEXT, "llama"),
            "tokenizer.ggml.tokens": (ARRAY, (TEXT, texts)),
            "tokenizer.ggml.scores": (ARRAY, (FLOAT, scores)),
            "tokenizer.ggml.token_type": (ARRAY, (WHOLE, kinds)),
            "tokenizer.chat_template": (TEXT, "{{ bos_token }}{{ messages[0].content }}"),
            "general.sampling.temp": (FLOAT, 0.6),
        }
        file = tmp_path / "sha256-0123"
        write_gguf(file, keys | {name.replace("__", "."): value for name, value in others.items()}, {})
        return file

    return write


def test_a_router_reads_them_of_a_file_without_a_suffix(write):
    file = write()
    tokenizer = TextTokenizer.load(file, 1, 1)
    assert tokenizer.tokenizer.encode("ab").ids == [1, len(PIECES) - 6]
    tokenizer.close()
    template = load_chat_template(file)
    assert template is not None and template.tokens["bos_token"] == "<s>"
    assert read_defaults(file) == {"do_sample": True, "temperature": 0.6}


def test_a_machine_without_the_file_of_a_repository_is_told_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(StartError, match="download-weights org/name:Q4_K_M"):
        find_model_files("org/name:Q4_K_M", None)


def test_the_check_of_a_start_takes_the_file_and_names_what_is_wrong_with_it(write):
    run_child(file_check.__name__, str(write()))
    with pytest.raises(
        WeightsError, match=r"sha256-0123.*is not a good GGUF file: tokenizer.ggml.eos_token_id is 9999"
    ):
        run_child(file_check.__name__, str(write(tokenizer__ggml__eos_token_id=(WHOLE, 9999))))
    with pytest.raises(WeightsError, match="unexpected"):
        run_child(file_check.__name__, str(write(tokenizer__chat_template=(TEXT, "{% unexpected %}"))))
