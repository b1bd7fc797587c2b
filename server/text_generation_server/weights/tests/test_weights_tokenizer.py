"""A fast tokenizer is used if it exists. Otherwise it is made, or an error of one line asks for it."""

import importlib.util
import json
import os

import pytest
from sentencepiece_files import SPECIAL, model_file, scored
from tokenizers import Tokenizer

from text_generation_common.errors import WeightsError
from text_generation_server.weights.tokenizer import ensure_fast_tokenizer

# find_spec does not import transformers: the code under test must not need it in this process.
needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


def test_a_tokenizer_json_is_left_alone(tmp_path):
    (tmp_path / "tokenizer.json").write_text("mine")
    ensure_fast_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "mine"


def test_without_any_tokenizer_the_line_says_what_is_needed(tmp_path):
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json \(a fast tokenizer\)"):
        ensure_fast_tokenizer(tmp_path)


@needs_transformers
def test_a_fast_tokenizer_is_made_from_slow_files(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    ensure_fast_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("hello world", add_special_tokens=False).ids == [5, 6]


@needs_transformers
@pytest.mark.parametrize("name", ["vocab.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_pipe_among_the_slow_files_holds_up_nothing(tmp_path, name):
    (tmp_path / "merges.txt").write_text("#version: 0.2")
    os.mkfifo(tmp_path / name)
    with pytest.raises(WeightsError, match=rf"{name} cannot be read \(not a regular file\)"):
        ensure_fast_tokenizer(tmp_path)


@needs_transformers
def test_slow_files_that_are_broken_are_one_line_and_run_no_code(tmp_path):
    executed = tmp_path / "executed"
    (tmp_path / "vocab.json").write_bytes(b"broken")
    (tmp_path / "evil.py").write_text(f"open({str(executed)!r}, 'w').close()\nclass Evil: pass\n")
    automatic = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(automatic))
    config = {"model_type": "nothing", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json \(a fast tokenizer\)") as refused:
        ensure_fast_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)
    assert not executed.exists() and not (tmp_path / "tokenizer.json").exists()


def test_pieces_that_need_more_memory_than_their_file_may_take_end_a_child(tmp_path):
    pieces = [*SPECIAL, *scored(["a" * (n + 1) for n in range(3000)])]
    (tmp_path / "tokenizer.model").write_bytes(model_file(pieces, "bpe"))
    with pytest.raises(WeightsError, match=r"more (memory|processor time) than a file of its size may take"):
        ensure_fast_tokenizer(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
