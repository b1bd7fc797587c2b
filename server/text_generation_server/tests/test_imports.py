import subprocess
import sys

SERVES = """
import sys
import torch
import text_generation_server.server
from text_generation_server.cli import _folder, _hub_access
from text_generation_server.kernels.cpu.programs import Recorder
with Recorder() as recorder:
    torch.empty(1)
assert recorder.sizes == [4], recorder.sizes
_folder(".", None, _hub_access({}))
print(*(name for name in ("transformers", "torch._dynamo", "sympy", "huggingface_hub") if name in sys.modules))
"""


def test_serving_a_directory_imports_neither_transformers_nor_torchs_compiler_nor_the_hubs_client() -> None:
    """Each takes a quarter of a second or more to import, and serving needs none: we read config.json and
    tokenizer.json ourselves, and steps are recorded without torch's compiler."""
    answer = subprocess.run([sys.executable, "-c", SERVES], timeout=120, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []
