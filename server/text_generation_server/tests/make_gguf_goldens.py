"""Writes gguf_goldens.json again: what llama.cpp's converter makes of the checkpoints of `gguf_fixtures.py`.

    python make_gguf_goldens.py FOLDER-OF-LLAMA.CPP [FIXTURE …]

llama.cpp's source is in a package: pip download --no-binary :all: --no-deps llama-cpp-python
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf_fixtures import FIXTURES, GOLDENS, hash_of, make_original, variants_of
from torch import Tensor

from text_generation_common.gguf.container import GgufArray, GgufTensor, read_header

SMALL = 64  # numbers of a tensor that the goldens have themselves
# Keys that say nothing of the computation.
OTHERS = ("general.name", "general.size_label", "general.type", "general.license", "general.sampling", "GGUF.")
RENAMED = {"MptForCausalLM": "MPTForCausalLM"}  # classes that transformers spells otherwise
# Fixtures that another model's converter takes: the text part of a model of texts and images has the same tensors.
TAKEN_AS = {"mistral3": "Mistral3ForConditionalGeneration"}


def convert(folder: Path, path: Path, fixture: str) -> None:
    """By llama.cpp's code, without a vocabulary."""
    import conversion
    import gguf

    config = json.loads((folder / "config.json").read_text())
    name = config["architectures"][0]
    config["architectures"] = [TAKEN_AS.get(fixture) or RENAMED.get(name, name)]
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {str(number): number for number in range(config["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    model: Any = conversion.get_model_class(config["architectures"][0])(folder, gguf.LlamaFileType.ALL_F32, path)
    if name == "GPTNeoXForCausalLM":  # a field of older versions of transformers
        model.hparams["rotary_pct"] = config["rope_parameters"]["partial_rotary_factor"]

    writing = getattr(model, "impl", model)

    def set_vocab() -> None:
        writing.gguf_writer.add_tokenizer_model("none")
        writing.gguf_writer.add_eos_token_id(2)

    writing.set_vocab = set_vocab
    model.write()


def golden_of(folder: Path, path: Path) -> dict[str, Any]:
    header = read_header(path)
    keys = {}
    for name, value in header.metadata.items():
        if not name.startswith(OTHERS):
            is_list = isinstance(value, GgufArray)
            keys[name] = [9, [value.kind, value.values()]] if is_list else [_kind(value), value]
    golden: dict[str, Any] = {"keys": keys, "tensors": []}
    known = {hash_of(tensor) for tensor in variants_of(folder, golden)}
    for name, tensor in header.tensors.items():
        numbers = _numbers(path, tensor)
        entry = {"name": name, "shape": list(numbers.shape)}
        key = hash_of(numbers)
        if key not in known and numbers.numel() > SMALL:
            raise SystemExit(f"{path}: {name} is made in a way that gguf_fixtures.py does not know")
        golden["tensors"].append(entry | ({"hash": key} if key in known else {"numbers": numbers.flatten().tolist()}))
    return golden


def _numbers(path: Path, tensor: GgufTensor) -> Tensor:
    data = bytearray(path.read_bytes()[tensor.offset : tensor.offset + tensor.size])
    return torch.frombuffer(data, dtype=torch.float32).view(tensor.shape)


def _kind(value: object) -> int:
    return 7 if isinstance(value, bool) else 8 if isinstance(value, str) else 4 if isinstance(value, int) else 6


def main(llama_cpp: str, *fixtures: str) -> None:
    sys.path[:0] = [f"{llama_cpp}/gguf-py", llama_cpp]
    goldens = json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}
    for fixture in fixtures or FIXTURES:
        with tempfile.TemporaryDirectory() as folder:
            original, path = Path(folder, "original"), Path(folder, "model.gguf")
            make_original(original, fixture)
            convert(original, path, fixture)
            goldens[fixture] = golden_of(original, path)
            print(fixture, len(goldens[fixture]["tensors"]), "tensors", flush=True)
        lines = (f"{json.dumps(name)}: {json.dumps(golden)}" for name, golden in sorted(goldens.items()))
        GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
