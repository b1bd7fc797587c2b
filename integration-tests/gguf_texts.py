"""10,000 texts, cut into tokens by llama.cpp and by this server, for each of llama.cpp's vocabulary files whose kind of
tokenizer is served: `make gguf-texts LLAMA=FOLDER`. Prints how many differ, and the first that does. The texts that
llama.cpp has beside a vocabulary must have the ids that are written there.

Texts are cuts of those that llama.cpp tests its vocabularies with, which are in many languages, joined with random
characters of many scripts.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from text_generation_benchmark.peers.servers import LIBRARY, run_in
from text_generation_common.errors import WeightsError
from text_generation_common.gguf.container import read_header
from text_generation_common.gguf.tokenizer import tokenizer_json

BETWEEN = "\n__ggml_vocab_test__\n"
SEED, MAX_CHARS = 20_261_127, 120
# First and last characters of scripts, of signs and of spaces.
RANGES = (
    (0x20, 0x7E), (0x9, 0xD), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F),
    (0xE00, 0xE7F), (0x2000, 0x206F), (0x20A0, 0x20BF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0xFF00, 0xFFEF), (0x1F300, 0x1F6FF),
)  # fmt: skip


def texts_from(folder: Path, number: int) -> Iterator[str]:
    chance = random.Random(SEED)
    known = sorted({text for file in folder.glob("*.inp") for text in file.read_text().split(BETWEEN) if text})
    for _ in range(number):
        pieces = []
        for _ in range(chance.randint(1, 4)):
            text = chance.choice(known)
            start = chance.randrange(len(text))
            pieces.append(text[start : start + chance.randint(1, MAX_CHARS)])
            pieces.append("".join(chr(chance.randint(*chance.choice(RANGES))) for _ in range(chance.randint(0, 6))))
        yield "".join(pieces)


def ours(vocabulary: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_str(json.dumps(dict(tokenizer_json(read_header(vocabulary)))))
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def wrong_beside(vocabulary: Path) -> int:
    """How many of the texts beside a vocabulary have other ids here than those that are written there."""
    texts, ids = (vocabulary.with_name(vocabulary.name + ending) for ending in (".inp", ".out"))
    if not ids.exists():
        return 0
    expected = [[*map(int, line.split())] for line in ids.read_text().splitlines()]
    found = ours(vocabulary, texts.read_text().split(BETWEEN)[: len(expected)])
    return sum(one != other for one, other in zip(found, expected, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="llama.cpp's source")
    parser.add_argument("--llama", type=Path, default=Path(".venv-llama-cpp"), help="llama.cpp's virtual environment")
    parser.add_argument("--number", type=int, default=10_000)
    arguments = parser.parse_args()
    texts, wrong = [*texts_from(arguments.folder / "models", arguments.number)], 0
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "texts.json"), Path(folder, "ids.json")
        given.write_text(json.dumps(texts))
        for vocabulary in sorted((arguments.folder / "models").glob("ggml-vocab-*.gguf")):
            try:
                found, beside = ours(vocabulary, texts), wrong_beside(vocabulary)
            except WeightsError as error:
                print(f"{vocabulary.name}: {str(error).partition(': ')[2]}")
                continue
            run_in(arguments.llama, LIBRARY, "tokenize", vocabulary, given, out)
            pairs = zip(texts, found, json.loads(out.read_text()), strict=True)
            differing = [(text, ids, theirs) for text, ids, theirs in pairs if ids != theirs]
            first, wrong = ascii(differing[:1])[:600], wrong + beside
            print(f"{vocabulary.name}: {len(differing)} of {len(texts)} differ, {beside} beside it {first}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
