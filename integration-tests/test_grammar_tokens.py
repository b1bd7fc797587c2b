"""Grammars and texts agree on the bytes of each token, so that a text is what its grammar says, spaces included."""

import re
from pathlib import Path

import pytest
from grammar_tools import END, byte_level_tokenizer, regex_grammar, tokens_of
from llguidance import LLTokenizer
from sentencepiece_files import byte_pieces
from shard_tools import CPU, Client, make_checkpoint, make_runner, random_ids, scattered_slots
from tokenizers import Tokenizer

from text_generation_common.sampling import Sampling
from text_generation_router.text.tokens.detokenization import TextStream, Vocabulary
from text_generation_server.grammars.compiler import GrammarCompiler
from text_generation_server.grammars.constraints import Constraints
from text_generation_server.weights.added_tokens import Additions
from text_generation_server.weights.sentencepiece import read_sentencepieces
from text_generation_server.weights.sentencepiece_tokenizer import make_tokenizer

DEMO = Path(__file__).parent.parent / "server/text_generation_server/demo_model/tokenizer.json"
NOT_UTF8 = b"\xff"  # no text has this byte, which llguidance uses for special tokens
SIZE = 320


def sentencepieces() -> Tokenizer:
    return make_tokenizer(read_sentencepieces(byte_pieces(SIZE), "m"), Additions(), "m")


TOKENIZERS = {
    "byte level": byte_level_tokenizer,
    "demo model": lambda: Tokenizer.from_file(str(DEMO)),
    "sentencepiece": sentencepieces,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_token_has_the_same_bytes_in_a_grammar_and_in_a_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    vocabulary, size = Vocabulary.of(tokenizer), tokenizer.get_vocab_size()
    in_grammars = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=[END])
    ordinary = [i for i in range(size) if i not in vocabulary.special_ids and vocabulary.bytes_of(i) != NOT_UTF8]
    assert len(ordinary) > size - 10
    assert [in_grammars.decode_bytes([i]) for i in ordinary] == [vocabulary.bytes_of(i) for i in ordinary]


@pytest.mark.parametrize("name", ["byte level", "sentencepiece"])
def test_a_text_has_the_spaces_and_characters_of_its_grammar(tmp_path: Path, name: str) -> None:
    tokenizer, form = TOKENIZERS[name](), r'(  the|a\n) \{"é": [0-9]{1,3}\}( 😀|  t){2}\n'
    make_checkpoint(tmp_path)
    runner = make_runner(tmp_path, constraints=Constraints(GrammarCompiler(tokens_of(tokenizer, SIZE)), CPU))
    runner.warmup(256, None, 8, None)
    client, ids, vocabulary = Client(runner, scattered_slots(runner)), list(range(8)), Vocabulary.of(tokenizer)
    prompts = {i: random_ids(9, i) for i in ids}
    asked = [Sampling(grammar=regex_grammar(form), do_sample=True, seed=i) for i in ids]
    chunks = [client.first_chunk(i, prompts[i], parameters=asked[i]) for i in ids]
    complete: set[int] = set()
    for step in range(60):
        output = client.step(ids if step else [], [] if step else chunks)
        for i in set(output.complete_ids) - complete:
            stream = TextStream(vocabulary, prompts[i].tolist(), ())
            text = "".join(stream.push(token).plain for token in client.tokens[i]) + stream.flush()
            assert re.fullmatch(form, text), text
        complete.update(output.complete_ids)
    assert complete == set(ids)
