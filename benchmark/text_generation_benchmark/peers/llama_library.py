"""What llama.cpp's library makes of a GGUF file: `python llama_library.py COMMAND ARGUMENT …`.

    quantize MODEL FOLDER TYPE … FOLDER/MODEL-TYPE.gguf of each type of weights, in llama.cpp's words: Q4_K_M, ALL_F32
    logits MODEL IDS OUT         IDS: whole numbers [texts, tokens] as numpy saves them; OUT: float32, with a
                                 third dimension for the vocabulary
    tokenize MODEL TEXTS OUT     TEXTS: a JSON list of texts; OUT: a JSON list of lists of ids
    dequantize MODEL …           MODEL.npz beside each: all tensors, as the package `gguf` computes them

Runs in llama.cpp's virtual environment, and imports only packages that are there.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import llama_cpp  # type: ignore[import-not-found]
import numpy as np

MAX_TOKENS = 2**16  # room for the ids of one text


@contextmanager
def loaded(file: str, vocabulary_only: bool = False) -> Iterator[tuple[Any, Any]]:
    """A model and its vocabulary."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = vocabulary_only
    model = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp does not read {file}")
    yield model, llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


def quantize(file: str, folder: str, *kinds: str) -> None:
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.allow_requantize = True
    for kind in kinds:
        out = str(Path(folder, f"{Path(file).stem}-{kind}.gguf"))
        name = "LLAMA_FTYPE_ALL_F32" if kind == "ALL_F32" else f"LLAMA_FTYPE_MOSTLY_{kind}"
        parameters.ftype = getattr(llama_cpp, name)
        if llama_cpp.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(parameters)):
            raise SystemExit(f"llama.cpp does not make {kind} of {file}")


def logits(file: str, ids: str, out: str) -> None:
    texts = np.load(ids)
    with loaded(file) as (model, vocabulary):
        size, context = llama_cpp.llama_vocab_n_tokens(vocabulary), _context(model, texts.shape[1])
        batch = llama_cpp.llama_batch_init(texts.shape[1], 0, 1)
        found = np.lib.format.open_memmap(out, "w+", np.float32, (*texts.shape, size))
        for number, text in enumerate(texts):
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            batch.n_tokens = len(text)
            for place, id in enumerate(text.tolist()):
                batch.token[place], batch.pos[place], batch.logits[place] = id, place, 1
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            if llama_cpp.llama_decode(context, batch):
                raise SystemExit(f"llama.cpp does not compute text {number}")
            found[number] = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), found[number].shape)
        llama_cpp.llama_free(context)


def _context(model: Any, tokens: int) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = tokens
    parameters.n_threads = parameters.n_threads_batch = os.cpu_count()
    return llama_cpp.llama_init_from_model(model, parameters)


def tokenize(file: str, texts: str, out: str) -> None:
    room = (llama_cpp.llama_token * MAX_TOKENS)()
    with loaded(file, vocabulary_only=True) as (_, vocabulary):

        def ids_of(text: str) -> list[int]:
            content = text.encode()
            count = llama_cpp.llama_tokenize(vocabulary, content, len(content), room, MAX_TOKENS, False, True)
            return list(room[:count])

        Path(out).write_text(json.dumps([ids_of(text) for text in json.loads(Path(texts).read_text())]))


def dequantize(*files: str) -> None:
    for file in files:
        tensors = gguf.GGUFReader(file).tensors
        found = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}
        np.savez(Path(file).with_suffix(".npz"), **found)


COMMANDS: Mapping[str, Callable[..., None]] = {
    "quantize": quantize,
    "logits": logits,
    "tokenize": tokenize,
    "dequantize": dequantize,
}

if __name__ == "__main__":
    llama_cpp.llama_backend_init()
    COMMANDS[sys.argv[1]](*sys.argv[2:])
