"""A header that lies is refused in one line, with little memory: by hand, and by chance, for every architecture.

python test_hostile_headers.py COUNT SEED
"""

import math
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_architectures import I32, NAMES, Entry, Keys, content_of, data_bytes, entries_of, keys_of
from gguf_writer import header, text, write_gguf

from text_generation_common.errors import ModelError, WeightsError
from text_generation_common.gguf import container
from text_generation_common.gguf.config import config_json
from text_generation_common.gguf.container import is_gguf, read_header
from text_generation_common.gguf.side_files import MADE, refuse_beginning, side_file
from text_generation_common.gguf.tensors import model_tensors
from text_generation_common.models.served import read_served

U32, F32, BOOL, TEXT, ARRAY, U64, F64 = 4, 6, 7, 8, 9, 10, 12
KEYS: dict[str, Any] = {
    "general.architecture": (TEXT, "llama"),
    "general.alignment": (U32, 32),
    "llama.block_count": (U32, 1),
    "llama.context_length": (U32, 64),
    "llama.embedding_length": (U32, 8),
    "llama.feed_forward_length": (ARRAY, (U32, [16])),
    "llama.attention.head_count": (U32, 2),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.attention.causal": (BOOL, True),
    "tokenizer.ggml.model": (TEXT, "llama"),
    "tokenizer.ggml.tokens": (ARRAY, (TEXT, ["a", "b", "ü", ""])),
    "tokenizer.ggml.scores": (ARRAY, (F32, [0.5, 1.5, 2.5, 3.5])),
    "tokenizer.ggml.eos_token_id": (U32, 2),
}
SHAPES = {"token_embd.weight": (4, 8), "output_norm.weight": (8,), "blk.0.attn_q.weight": (8, 8)}
# What a file may cost that is refused; memory beside what its values take in a good file, which is nearly nothing here.
MAX_S, MAX_BYTES = 1.0, 64 * 2**20
MAX_TEXT = 600  # characters of a message
EXTREMES = (0, 1, 2**16, 10**9, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
NOT_A_NUMBER, INFINITE = (F32, math.nan), (F64, math.inf)
# Values that are put in the place of any key's, alone or in a list.
ODD = (
    NOT_A_NUMBER, INFINITE, (F64, 1e308), (TEXT, "x\ny"), (TEXT, ""), (TEXT, "yarn"), (BOOL, True), (U32, 0), (U32, 1),
    (I32, -1), (U64, 2**64 - 1),
)  # fmt: skip
# Further keys that may get one. The second ones begin with the architecture.
NEW_KEYS = (
    "split.count", "split.no", "split.tensors.count", "general.sampling.x\ny", "tokenizer.chat_template.x\ny",
    "tokenizer.huggingface.json", "tokenizer.ggml.scores", "tokenizer.ggml.merges",
)  # fmt: skip
NEW_KEYS_OF_ARCHITECTURES = (
    "x\ny", "attention.value_length", "expert_count", "nextn_predict_layers", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.factor", "rope.scaling.type",
)  # fmt: skip
SEEDS, QUICK_CASES = 1, 300


def write_model(path: Path, **keys: Any) -> Path:
    write_gguf(path, {**KEYS, **keys}, {name: torch.ones(shape) for name, shape in SHAPES.items()})
    return path


# All that programs read of a file. Each reads what it needs, whatever another one has refused.
READERS: tuple[Callable[[Path], Any], ...] = (
    read_header,
    *(lambda path, name=name: side_file(path / name) for name in MADE),
    lambda path: model_tensors(read_header(path)),
    read_served,
    lambda path: refuse_beginning(path.stat().st_size, path.name, [path.name], path),
)


def refusal(path: Path) -> str | None:
    """The first message if the file is refused. Any other error, too much processor time, and too much memory, fail."""
    messages = []
    tracemalloc.start()
    started_s = time.process_time()
    try:
        for read in READERS:
            try:
                read(path)
            except (WeightsError, ModelError) as error:
                messages.append(message := str(error))
                assert "\n" not in message and len(message) <= MAX_TEXT + len(str(path)), message
                if read is read_header:  # as all others begin
                    break
    finally:
        taken_s = time.process_time() - started_s
        assert taken_s <= MAX_S, f"{taken_s:.2f} s of processor time"
        assert (taken := tracemalloc.get_traced_memory()[1]) <= MAX_BYTES, f"{taken / 2**20:.0f} MiB"
        tracemalloc.stop()
    return messages[0] if messages else None


def raw(counts: tuple[int, int], *parts: bytes, version: int = 3) -> bytes:
    """A file of a version that counts tensors and keys."""
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(parts) + bytes(64)


def one_tensor(shape: list[int], number: int = 0, offset: int = 0) -> bytes:
    return header({"general.architecture": (TEXT, "llama")}, [("t", shape, number, offset)]) + bytes(256)


def name(value: bytes, kind: int) -> bytes:
    return text(value) + struct.pack("<I", kind)


LIES: dict[str, tuple[bytes, str]] = {
    "nothing behind the magic": (b"GGUF", "it has 4 bytes only"),
    "a billion keys": (raw((0, 10**9)), "counts 1000000000 keys"),
    "a billion tensors": (raw((10**9, 0)), "counts 1000000000 tensors"),
    "the other byte order": (raw((0, 0), version=3 << 24), "of version 50331648"),
    "a long name": (raw((0, 1), struct.pack("<Q", 2**63)), "a name has 9223372036854775808 bytes"),
    "a name that is not UTF-8": (raw((0, 1), name(b"\xff", U32)), "a name is not UTF-8"),
    "a long text": (raw((0, 1), name(b"k", TEXT), struct.pack("<Q", 2**63)), "it is cut off"),
    "a long list": (raw((0, 1), name(b"k", ARRAY), struct.pack("<IQ", U32, 2**62)), "elements of k"),
    "a list of lists": (raw((0, 1), name(b"k", ARRAY), struct.pack("<IQ", ARRAY, 1)), "elements of type 9"),
    "texts behind the end": (
        raw((0, 1), name(b"k", ARRAY), struct.pack("<IQQ", TEXT, 2, 2**10)), "it is cut off"
    ),
    "a long text in a list": (
        raw((0, 1), name(b"k", ARRAY), struct.pack("<IQQ", TEXT, 1, 2**40)), "k has a text of 1099511627776 bytes"
    ),
    "a kind that is not known": (raw((0, 1), name(b"k", 77)), "has the type 77"),
    "a key that is there twice": (raw((0, 2), name(b"k", U32), bytes(4), name(b"k", U32), bytes(4)), "twice"),
    "five dimensions": (one_tensor([1] * 5), "has 5 dimensions"),
    "no dimensions": (one_tensor([]), "has 0 dimensions"),
    "a product that overflows": (one_tensor([2**32, 2**32]), "where the file has no room"),
    "an empty dimension": (one_tensor([0, 4]), "rows of 4"),
    "half a block": (one_tensor([2, 48], number=2), "not of blocks of 32 numbers"),
    "an offset behind the end": (one_tensor([4], offset=2**40), "where the file has no room"),
    "an offset between numbers": (one_tensor([4], offset=1), "where the file has no room"),
    "a type of another program": (one_tensor([4], number=40), "the type NVFP4, which is not supported"),
    "a type that is not known": (one_tensor([4], number=99), "the type number 99, which is not supported"),
    "an alignment of three": (
        header({"general.alignment": (U32, 3)}, []) + bytes(64), "general.alignment is not a power of two"
    ),
    "a tensor within another": (
        header({}, [("a", [16], 0, 0), ("b", [4], 0, 32)]) + bytes(256), "the tensor b begins within another"
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_in_one_line_that_names_it(tmp_path: Path, lie: str) -> None:
    content, told = LIES[lie]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    message = refusal(path)
    assert message is not None and told in message and str(path) in message


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"general.architecture": (TEXT, "mamba")}, "the architecture mamba is not supported in GGUF files"),
        ({"llama.attention.clamp_kqv": (F32, 8.0)}, "the key llama.attention.clamp_kqv is 8.0, which is not supported"),
        ({"llama.expert_gating_func": (U32, 2)}, "the key llama.expert_gating_func is 2"),
        ({"llama.attention.head_count": (ARRAY, (U32, [2, 4]))}, "llama.attention.head_count differs between layers"),
        ({"llama.block_count": (U32, 2**31)}, "llama.block_count is 2147483648"),
        ({"llama.rope.dimension_count": (U32, 2)}, "rope.dimension_count is 2, and must be the size of heads, 4"),
        ({"llama.attention.value_length": (U32, 8)}, "heads of values have the size 8, and those of keys 4"),
        ({"tokenizer.ggml.scores": (ARRAY, (F32, [0.5]))}, "tokenizer.ggml.scores does not have one number for each"),
        ({"tokenizer.ggml.tokens": (ARRAY, (TEXT, ["a"]))}, "it has 1 tokens, and 4 rows in token_embd.weight"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    assert told in (refusal(write_model(tmp_path / "model.gguf", **keys)) or "")


@pytest.mark.parametrize(
    ("model", "keys", "told"),
    [
        ("mpt", {"mpt.attention.max_alibi_bias": NOT_A_NUMBER}, "mpt.attention.max_alibi_bias is not a finite number"),
        ("mpt", {"mpt.attention.clamp_kqv": INFINITE}, "mpt.attention.clamp_kqv is not a finite number"),
        ("mpt", {"mpt.feed_forward_length": (TEXT, "a\nb")}, "mpt.feed_forward_length is not a whole number"),
        ("mpt", {"mpt.embedding_length": (U32, 0)}, "mpt.embedding_length is 0, and must be at least 1"),
        ("gemma2, 27b", {"gemma2.attention.head_count": None}, "it has no key gemma2.attention.head_count"),
        ("glm4", {"glm4.attention.key_length": (TEXT, "8")}, "glm4.attention.key_length is not a whole number"),
        ("bloom", {"bloom.attention.value_length": (TEXT, "\n")}, "bloom.attention.value_length is not a whole number"),
        ("qwen3", {"tokenizer.ggml.token_type": (ARRAY, (F32, [math.nan] * 12))}, "does not have one whole number for"),
        ("qwen3", {"tokenizer.chat_template.a\nb": (U32, 1)}, r"tokenizer.chat_template.a\nb is not a text"),
        ("llama, rope_freqs", {"llama.rope.dimension_count": (U64, 2**63)}, "must have 4611686018427387904 numbers"),
    ],
)
def test_a_value_of_another_kind_is_refused_before_it_is_computed_with(
    tmp_path: Path, model: str, keys: dict[str, Any], told: str
) -> None:
    entries, path = entries_of(model), tmp_path / "model.gguf"
    changed = {key: value for key, value in {**keys_of(model), **keys}.items() if value is not None}
    path.write_bytes(content_of(changed, entries, data_bytes(entries)))
    assert told in (refusal(path) or "")


@pytest.mark.parametrize("model", NAMES)
def test_what_is_changed_at_random_is_read_as_it_is(tmp_path: Path, model: str) -> None:
    entries, path = entries_of(model), tmp_path / "model.gguf"
    path.write_bytes(content_of(keys_of(model), entries, data_bytes(entries)))
    assert refusal(path) is None


@pytest.mark.parametrize("shape", [[20_000_000], [5], [2, 2]])
def test_factors_of_ropes_are_read_if_they_are_as_many_as_a_head_has_pairs(tmp_path: Path, shape: list[int]) -> None:
    """The file has a hole in the place of them."""
    entries, path = entries_of("llama, rope_freqs"), tmp_path / "model.gguf"
    [(place, offset)] = [(i, entry[3]) for i, entry in enumerate(entries) if entry[0] == "rope_freqs.weight"]
    entries[place] = "rope_freqs.weight", shape, 0, offset
    content = content_of(keys_of("llama, rope_freqs"), entries, offset)
    with path.open("wb") as file:
        file.write(content)
        file.truncate(len(content) + math.prod(shape) * 4)
    assert f"stored as F32 with the shape {shape}, and must have 4 numbers of F32" in (refusal(path) or "")


MANY, LONG = 2**20, 2**22
LARGE: list[tuple[str, bytes, str]] = [
    (
        "llama.attention.head_count_kv", struct.pack("<IIQ", ARRAY, U64, MANY) + array("Q", range(MANY)).tobytes(),
        "llama.attention.head_count_kv has 1048576 values, more than models have layers",
    ),
    (
        "general.description", struct.pack("<IQ", TEXT, LONG) + "ü".encode().ljust(LONG),
        "the texts of its keys, with general.description, have more than 1048576 bytes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "told"), LARGE, ids=[key for key, _, _ in LARGE])
def test_a_large_value_is_refused_before_it_is_read(tmp_path: Path, key: str, value: bytes, told: str) -> None:
    content, path = write_model(tmp_path / "whole.gguf").read_bytes(), tmp_path / "model.gguf"
    tensors, keys = struct.unpack_from("<QQ", content, 8)
    path.write_bytes(content[:8] + struct.pack("<QQ", tensors, keys + 1) + text(key) + value + content[24:] + bytes(32))
    assert told in (refusal(path) or "")


def test_the_headers_of_all_parts_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_parts(tmp_path)
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", container.header_end(paths[0]) + 100)
    container._read.cache_clear()
    assert "m-00002-of-00002.gguf is not a good GGUF file: its header has more than" in (refusal(paths[0]) or "")


def test_a_file_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    content = write_model(tmp_path / "whole.gguf").read_bytes()
    assert refusal(tmp_path / "whole.gguf") is None
    path = tmp_path / "model.gguf"
    for length in range(4, len(content) - 32, 7):
        path.write_bytes(content[:length])
        assert refusal(path) is not None


def write_parts(folder: Path, numbers: tuple[int, ...] = (0, 1)) -> list[Path]:
    names = list(SHAPES)
    counts = {"split.count": (2, 2), "split.tensors.count": (5, len(SHAPES))}
    paths = []
    for place, number in enumerate(numbers):
        keys = {**(KEYS if not place else {}), **counts, "split.no": (2, number)}
        held = {name: torch.ones(SHAPES[name]) for name in (names[:1], names[1:])[place]}
        paths.append(folder / f"m-{place + 1:05}-of-00002.gguf")
        write_gguf(paths[-1], keys, held)
    return paths


def test_any_part_names_the_whole_model(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    for path in paths:
        header = read_header(path)
        assert header.files == tuple(paths) and header.tensors.keys() == SHAPES.keys()
        assert [tensor.part for tensor in header.tensors.values()] == [0, 1, 1]
        assert config_json(header)["vocab_size"] == 4


def remove(paths: list[Path]) -> None:
    paths[1].unlink()


def rename(paths: list[Path]) -> None:
    paths[0].rename(paths[0].with_name("other.gguf"))


@pytest.mark.parametrize(
    ("change", "opened", "told"),
    [
        (remove, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf is missing, a part of the model"),
        (rename, "other.gguf", "is part 1 of 2, and its name does not say so"),
        (lambda paths: write_parts(paths[0].parent, (0, 0)), "m-00001-of-00002.gguf", "its name says 2"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, change: Callable[[list[Path]], Any], opened: str, told: str
) -> None:
    change(write_parts(tmp_path))
    assert told in (refusal(tmp_path / opened) or "")


def test_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    assert is_gguf(write_model(tmp_path / "sha256-00ff"))
    (tmp_path / "model.gguf").write_bytes(b"GGML")
    for other in ("model.gguf", ".", "missing", "a\0b", "model.gguf/config.json"):
        assert not is_gguf(tmp_path / other)


def changed(content: bytes, chance: random.Random) -> bytes:
    """Up to four changes of bytes, of numbers, or of the length."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(4, max(5, len(data)))
        match chance.randrange(4):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                data[place : place + 8] = struct.pack("<Q", chance.choice(EXTREMES))
            case 2:
                data[place : place + 4] = struct.pack("<I", chance.choice(EXTREMES) & 0xFFFFFFFF)
            case _:
                del data[place : place + chance.choice((1, 8, len(data)))]
    return bytes(data)


def altered(keys: Keys, entries: list[Entry], chance: random.Random) -> tuple[Keys, list[Entry]]:
    """One or two keys without a value, or with one of another kind, or tensors in another place or form."""
    keys, entries, own = dict(keys), list(entries), keys["general.architecture"][1]
    for _ in range(chance.randint(1, 2)):
        if chance.random() < 0.8:
            key = chance.choice([*keys, *NEW_KEYS, *(f"{own}.{name}" for name in NEW_KEYS_OF_ARCHITECTURES)])
            old, (kind, value) = keys.pop(key, (U32, 0)), chance.choice(ODD)
            match chance.randrange(8), old[0]:
                case 0, _:
                    continue
                case ((1 | 2 | 3 | 4), container.ARRAY):
                    keys[key] = ARRAY, (kind, [value] * len(old[1][1]))
                case ((1 | 5), _):
                    keys[key] = ARRAY, (kind, [value] * chance.randrange(3))
                case _:
                    keys[key] = kind, value
        elif entries:
            name, shape, number, offset = entries.pop(chance.randrange(len(entries)))
            match chance.randrange(4):
                case 0:
                    shape = [chance.choice((1, 3, 4, 5, *EXTREMES)) for _ in range(chance.randint(1, 3))]
                case 1:
                    number = chance.choice((1, 2, 8, 14, 30, 39, 99))
                case 2:
                    offset = chance.choice((32, *EXTREMES))
                case _:
                    continue
            entries.append((name, shape, number, offset))
    return keys, entries


def fuzz(folder: Path, count: int, seed: int) -> int:
    """How many of `count` changed files are refused. Each is read, or refused in one line."""
    chance, path, refused = random.Random(seed), folder / "model.gguf", 0
    models = {name: (keys_of(name), entries_of(name)) for name in NAMES}
    for number in range(count):
        name = chance.choice(NAMES)
        keys, entries = models[name]
        size = data_bytes(entries)  # changes of the numbers of tensors would never be noticed
        if chance.random() < 0.7:
            data = content_of(*altered(keys, entries, chance), size)
        else:
            whole = content_of(keys, entries, size)
            data = changed(whole[:-size], chance) + whole[-size:]
        path.write_bytes(data)
        container._read.cache_clear()
        try:
            refused += refusal(path) is not None
        except BaseException:
            print(f"seed {seed}, case {number}, {name}: {data[:-size].hex()}", file=sys.stderr)
            raise
    return refused


def test_random_changes_are_read_or_refused(tmp_path: Path) -> None:
    assert fuzz(tmp_path, QUICK_CASES, seed=1) > QUICK_CASES // 3


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        count, seed = map(int, sys.argv[1:])
        print(f"{count} changed headers, seed {seed}: {fuzz(Path(made), count, seed)} refused, the others read")
