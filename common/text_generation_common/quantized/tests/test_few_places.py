"""Which files know the names of formats: a format is added in the rooms of quantized weights alone."""

import re
from pathlib import Path

NAMES = re.compile(
    r"gptq|\bawq|bitsandbytes|eetq|mxfp4|nvfp4|compressed.tensors|modelopt|auto.?round|\bnf4|fbgemm|exl2|marlin", re.I
)
ROOT = Path(__file__).parents[4]
PACKAGES = ("benchmark", "common", "launcher", "router", "server")
# The values of --quantize and their help; a note on biases of one format; random weights; models that are measured.
KNOWN = {
    "common/text_generation_common/flags/kinds.py",
    "common/text_generation_common/flags/model.py",
    "common/text_generation_common/models/quantized_layers.py",
    "server/text_generation_server/models/random_codes.py",
    "benchmark/text_generation_benchmark/micro/random_files.py",
}


def test_six_files_at_most_outside_the_rooms_of_quantized_weights_name_a_format():
    found = set()
    for package in PACKAGES:
        for file in sorted((ROOT / package).glob("text_generation_*/**/*.py")):
            inside = file.relative_to(ROOT)
            if not {"gguf", "quantized", "tests"} & {*inside.parts} and NAMES.search(file.read_text()):
                found.add(inside.as_posix())
    assert found == KNOWN and len(KNOWN) <= 6
