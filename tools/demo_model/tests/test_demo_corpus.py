import itertools
import json
import random
import re

import jinja2.sandbox
from demo_model import corpus, lexicon
from demo_model.corpus import SECOND_MIX, World
from demo_model.train import train_tokenizer
from tokenizers import Tokenizer

from text_generation_common.model_files import demo_directory

FOLDER = demo_directory()


def texts(seed: int, held_out: bool = False, count: int = 3000) -> list[str]:
    return list(itertools.islice(corpus.documents(seed, held_out=held_out), count))


def sums(documents: list[str]) -> set[str]:
    return {found for text in documents for found in re.findall(r"\b\d+ \+ \d+\b", text)}


def test_the_corpus_depends_on_the_seed_alone() -> None:
    assert texts(3, count=50) == texts(3, count=50) != texts(4, count=50)


def test_held_out_sums_and_names_never_occur_in_training() -> None:
    train, held_out = texts(1), texts(1, held_out=True)
    assert len(sums(held_out)) > 300 and not sums(train) & sums(held_out)
    names = {start + end for start in lexicon.STARTS for end in (*lexicon.ENDS, *lexicon.TOWN_ENDS)}
    world = World(random.Random(0), True, SECOND_MIX)
    kept_apart = {name for name in names if world.allowed("name", name)}
    assert len(kept_apart) > 200
    words = {word for text in train for word in re.findall(r"\b[A-Z][a-z]+\b", text)}
    assert not words & kept_apart


def test_answers_to_sums_are_right() -> None:
    for text in texts(2):
        for a, b, c in re.findall(r"\b(\d+) \+ (\d+) = (\d+)\b", text):
            assert int(a) + int(b) == int(c)


def test_json_answers_are_json() -> None:
    world = World(random.Random(5), False, SECOND_MIX)
    for _ in range(500):
        json.loads(corpus.json_request(world)[1])


def test_the_chat_template_writes_what_the_model_was_trained_on() -> None:
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    dialogue = corpus.dialogue(World(random.Random(1), False, SECOND_MIX), 3)
    messages = [{"role": role, "content": content} for role, content in dialogue]
    text = template.render(messages=messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True)
    assert text == "<s>" + corpus.render(dialogue) + "<|assistant|>"


def test_the_checkpoint_is_small_and_of_the_promised_shape() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert (FOLDER / "model.safetensors").stat().st_size <= 8 * 2**20
    assert config["num_attention_heads"] % 4 == 0 and config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] == 2048 and config["tie_word_embeddings"]


def test_the_committed_tokenizer_is_what_the_seed_makes() -> None:
    committed = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    made = train_tokenizer(seed=0)
    assert made.get_vocab() == committed.get_vocab()
    text = 'What is 17 + 25? Tarlo the fox said: "é 😀"'
    assert made.encode_batch([text])[0].ids == committed.encode_batch([text])[0].ids
