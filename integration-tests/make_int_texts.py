"""Compares the answers of the demo model with `--activations int8`, for each format of its weights: alone, in a crowd,
in chunks beside each other in little memory, and resumed after kills of a shard.

    make test-int-texts ARGS="--requests 1000 --formats int8 Q4_K_M --llama FOLDER"

GGUF files are quantized by llama.cpp, from the environment FOLDER. Prints a line for each way, and ends with status 1
if an answer differs."""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from asks import mixed_asks
from gguf_quality import Llama
from ways import SMALL, Way, compare

from text_generation_common.model_files import demo_directory

ON_LOAD = ("int8", "int4")
OF_FILES = ("Q8_0", "Q4_0", "IQ4_NL", "Q4_K_M", "Q6_K", "Q2_K")
TOKENS = (2, 120)  # lengths differ so much that too many rows are let in, and some preempted
WAYS = (
    Way("alone", (), at_once=1),
    Way("in a crowd", ()),
    Way("chunks, little memory", SMALL, shows=("preempted",)),
    Way("a shard killed", (), kill_every=120, shows=("resumed",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--formats", nargs="+", default=[*ON_LOAD, *OF_FILES], choices=[*ON_LOAD, *OF_FILES])
    parser.add_argument("--llama", type=Path, default=Path(".venv-llama-cpp"), help="llama.cpp's virtual environment")
    arguments = parser.parse_args()
    # The files have no chat template.
    asked, differ = [ask for ask in mixed_asks(arguments.requests, TOKENS) if "messages" not in ask.body], 0
    with TemporaryDirectory() as folder:
        llama, files = Llama(arguments.llama, Path(folder)), [kind for kind in arguments.formats if kind in OF_FILES]
        if files:
            llama.quantized(llama.write(demo_directory(), "demo"), *files)
        for kind in arguments.formats:
            print(f"{kind}:", flush=True)
            model = ["--quantize", kind] if kind in ON_LOAD else ["--model-id", str(Path(folder, f"demo-{kind}.gguf"))]
            differ += compare(WAYS, asked, [*model, "--activations", "int8"])
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
