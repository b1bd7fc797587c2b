"""Files that llama.cpp has quantized, computed by this server's kernels and by llama.cpp: `make gguf-quality`.

Two models are quantized to every type that llama.cpp makes: the demo model, and a wider one. All weights that are
read must be what the package `gguf` computes, bit by bit. Then both programs compute the same ids of texts that the
demo model has not seen, each token after all tokens before it. A table says how far they are, as KL divergences, from
the float32 model of the same quantized weights, and from the original. In float32 the kernels of every target that this
processor can run must come to the same log-probabilities, and the same most likely tokens, as that model.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_model.corpus import documents
from shard_tools import fresh_client, make_runner
from tokenizers import Tokenizer
from torch import Tensor

from text_generation_benchmark.checkpoint import write_checkpoint
from text_generation_benchmark.output import table
from text_generation_benchmark.peers.servers import LIBRARY, WRITER, run_in
from text_generation_benchmark.shapes import LlamaShape
from text_generation_common.cpu_features import NEEDS
from text_generation_common.flags.kinds import ActivationType
from text_generation_common.gguf.types import DENSE
from text_generation_common.model_files import demo_directory
from text_generation_common.quantized.tensors.blocks import read_blocks
from text_generation_common.quantized.tensors.matrix import exact_weight
from text_generation_server.kernels import select_backend
from text_generation_server.kernels.cpu.library import why_not
from text_generation_server.weights.gguf_files import GgufFiles

# Names of llama.cpp for files. MXFP4 is for experts only.
READ = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL",
    "IQ4_XS", "F16", "BF16", "ALL_F32",
)  # fmt: skip
COMPARED = ("Q8_0", "Q6_K", "Q4_K_M", "Q4_0", "Q2_K")
# Rows of whole blocks of 256, of which K-quants are made.
WIDE = LlamaShape(hidden=512, intermediate=768, layers=4, heads=8, kv_heads=4, vocabulary=2048)
CONTEXT = 512  # tokens of a text
SERVED = 8  # texts that are computed in float32 from the quantized file itself, too
SEED = 20_261_127
MOST = 1.05  # times llama.cpp's divergence from the float32 model of the quantized weights
EXACT = 1e-4  # largest difference of a log-probability in float32


class Listening:
    """A model that keeps the hidden states of its last forward pass."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *arguments: Any) -> Tensor:
        self.hidden = self.model.forward(*arguments)
        return self.hidden


@dataclass(frozen=True, slots=True)
class Llama:
    """llama.cpp's library, in a virtual environment of its own."""

    environment: Path
    folder: Path

    def run(self, *arguments: object) -> None:
        run_in(self.environment, LIBRARY, *arguments)

    def write(self, model: Path, name: str) -> Path:
        run_in(self.environment, WRITER, model, file := self.folder / f"{name}.gguf")
        return file

    def quantized(self, file: Path, *kinds: str) -> list[Path]:
        self.run("quantize", file, self.folder, *kinds)
        return [self.folder / f"{file.stem}-{kind}.gguf" for kind in kinds]

    def logprobs(self, file: Path, ids: np.ndarray) -> Tensor:
        np.save(given := self.folder / "ids.npy", ids)
        self.run("logits", file, given, out := self.folder / "logits.npy")
        return torch.from_numpy(np.load(out)).log_softmax(-1)


def differing(file: Path) -> list[str]:
    """The tensors that are not read as the package `gguf` computes them."""
    files, expected = GgufFiles(file), np.load(file.with_suffix(".npz"))
    found = []
    for name in files.names:
        described = files.describe(name)
        assert described is not None
        data = files.get(name)
        read = data.float() if described.type in DENSE else exact_weight(read_blocks(described.type, data, name))
        if not np.array_equal(read.numpy().view(np.int32), expected[name].view(np.int32)):
            found.append(f"{file.name} {name}")
    return found


def held_out(tokens: int) -> np.ndarray:
    """Ids of documents of another seed than the training's, and of names that it left out, in texts of equal length."""
    tokenizer = Tokenizer.from_file(str(demo_directory() / "tokenizer.json"))
    ids: list[int] = []
    for document in documents(SEED, held_out=True):
        ids += tokenizer.encode(document).ids
        if len(ids) >= tokens + CONTEXT:
            break
    return np.array(ids[: -(-tokens // CONTEXT) * CONTEXT], np.int32).reshape(-1, CONTEXT)


@torch.inference_mode()
def logprobs(
    file: Path,
    dtype: torch.dtype,
    ids: np.ndarray,
    activations: ActivationType = ActivationType.model,
    target: str | None = None,
) -> Tensor:
    """This server's log-probabilities after each token: [texts, tokens, vocabulary]."""
    heard: list[Listening] = []

    def wrap(model: Any) -> Listening:
        heard.append(Listening(model))
        return heard[0]

    longest = CONTEXT + 1  # a token is sampled behind each text
    kernels = select_backend(torch.device("cpu"), target, activations).kernels
    runner = make_runner(file, dtype, longest, kernels=kernels, wrap=wrap)
    runner.warmup(longest, None, 1, longest)
    found = []
    for text in torch.from_numpy(ids):
        client = fresh_client(runner)
        client.step([], [client.first_chunk(0, text)])
        found.append(heard[0].logits(heard[0].hidden[:CONTEXT]).float().log_softmax(-1))
    runner.close()
    return torch.stack(found)


def divergence(true: Tensor, other: Tensor) -> float:
    """The mean KL divergence of a token, in nats."""
    parts = ((p.double().exp() * (p.double() - q.double())).sum() for p, q in zip(true, other, strict=True))
    return float(sum(parts)) / (true.shape[0] * true.shape[1])


@dataclass(frozen=True, slots=True)
class Quality:
    """Divergences of one type."""

    kind: str
    ours: float  # from the float32 model of the quantized weights
    in_8_bits: float  # the same with --activations int8
    theirs: float
    same_token: tuple[float, float, float]  # shares of tokens after which the model's most likely one is these's, too
    ours_from_original: float
    theirs_from_original: float
    exact: float  # largest difference of a log-probability in float32 on any target, on both sides of the reading
    same: float  # least share of tokens after which the most likely one is the same then

    @property
    def is_good(self) -> bool:
        return self.ours <= MOST * self.theirs and self.exact <= EXACT and self.same == 1


def measure(llama: Llama, file: Path, original: Tensor, ids: np.ndarray) -> Quality:
    exact = logprobs(*llama.quantized(file, "ALL_F32"), torch.float32, ids)
    targets = [target for target in NEEDS if why_not(target) is None] or [None]
    served = [logprobs(file, torch.float32, ids[:SERVED], target=target) for target in targets]
    ours, theirs = logprobs(file, torch.bfloat16, ids), llama.logprobs(file, ids)
    in_8_bits, best = logprobs(file, torch.bfloat16, ids, ActivationType.int8), exact.argmax(-1)
    of_ours, of_8_bits, of_theirs = (
        (each.argmax(-1) == best).float().mean().item() for each in (ours, in_8_bits, theirs)
    )
    return Quality(
        file.stem,
        ours=divergence(exact, ours),
        in_8_bits=divergence(exact, in_8_bits),
        theirs=divergence(exact, theirs),
        same_token=(of_ours, of_8_bits, of_theirs),
        ours_from_original=divergence(original, ours),
        theirs_from_original=divergence(original, theirs),
        exact=max((each - exact[:SERVED]).abs().max().item() for each in served),
        same=min((each.argmax(-1) == best[:SERVED]).float().mean().item() for each in served),
    )


def as_markdown(measured: Sequence[Quality]) -> str:
    columns = (
        "type", "ours", "ours, int8", "llama.cpp", "ratio", "ratio, int8", "same token: ours, int8, llama.cpp",
        "ours, original", "llama.cpp, original", "float32", "same token in float32",
    )  # fmt: skip
    rows = [
        (
            each.kind, f"{each.ours:.3e}", f"{each.in_8_bits:.3e}", f"{each.theirs:.3e}",
            f"{each.ours / each.theirs:.3f}", f"{each.in_8_bits / each.theirs:.3f}",
            ", ".join(f"{share:.2%}" for share in each.same_token),
            f"{each.ours_from_original:.4e}", f"{each.theirs_from_original:.4e}", f"{each.exact:.1e}",
            f"{each.same:.2%}",
        )
        for each in measured
    ]  # fmt: skip
    return table(columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", type=Path, default=Path(".venv-llama-cpp"), help="llama.cpp's virtual environment")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--kinds", nargs="+", default=COMPARED, help="types whose divergences are measured")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llama = Llama(arguments.llama, Path(folder))
        write_checkpoint(Path(folder, "wide"), WIDE)
        demo, wide = llama.write(demo_directory(), "demo"), llama.write(Path(folder, "wide"), "wide")
        ids, measured = held_out(arguments.tokens), list[Quality]()
        original = logprobs(demo, torch.float32, ids)
        for file in llama.quantized(demo, *arguments.kinds):
            measured.append(measure(llama, file, original, ids))
            print(as_markdown(measured[-1:]), flush=True)
        files = [file for whole in (demo, wide) for file in llama.quantized(whole, *READ)]
        llama.run("dequantize", *files)
        wrong = [name for file in files for name in differing(file)]
        print(f"{len(READ)} types of two models: {len(wrong)} tensors are read otherwise {wrong}", flush=True)
    print(as_markdown(measured))
    return int(bool(wrong) or not all(each.is_good for each in measured))


if __name__ == "__main__":
    sys.exit(main())
