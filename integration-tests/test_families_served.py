"""Whole servers with models of four families: a shard is killed in mid-text, and every stream completes with the text
of an undisturbed run."""

import json
from pathlib import Path

import pytest
from asks import WORDS, plain
from family_checkpoints import SHAPE, make_family
from faults import SLOWER, streams_though_a_shard_is_killed
from sentencepiece_files import byte_pieces
from server_process import ServerProcess
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NEW_TOKENS = 160
ASKS = [plain(" ".join(WORDS[i:] + WORDS[:i])[:40], i if i % 2 else None, NEW_TOKENS) for i in range(12)]


def write_byte_level(path: Path) -> None:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"filler{i}" for i in range(SHAPE["vocab_size"] - len(symbols))]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate([*symbols, *fillers])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


def write_sentencepiece(path: Path) -> None:
    """A tokenizer.model alone, of which the server makes a tokenizer.json."""
    (path / "tokenizer.model").write_bytes(byte_pieces(SHAPE["vocab_size"]))


@pytest.mark.parametrize(
    ("variant", "write_tokenizer"),
    [
        pytest.param("bloom", write_byte_level, marks=pytest.mark.models),
        pytest.param("qwen3", write_byte_level, marks=pytest.mark.models),
        ("gemma3_text", write_sentencepiece),
        pytest.param("mixtral", write_sentencepiece, marks=pytest.mark.models),
    ],
)
def test_no_stream_notices_that_a_shard_is_killed(tmp_path: Path, variant: str, write_tokenizer) -> None:
    make_family(tmp_path, variant)
    write_tokenizer(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == variant
    flags = ("--model-id", str(tmp_path), "--max-total-tokens", "256", "--testing")
    with ServerProcess(*flags, environ={"FAILPOINTS": SLOWER}) as server:
        answers, killed_s = streams_though_a_shard_is_killed(server, ASKS)
    assert len({answer.text for answer in answers}) > len(ASKS) // 2
    assert all(answer.arrivals_s[0] < killed_s < answer.arrivals_s[-1] for answer in answers)
