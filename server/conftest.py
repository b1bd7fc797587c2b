"""Without a GPU, Triton's kernels are tested in its interpreter. The variable must be set before triton is imported,
which transformers does while a test runs. pytest reads this file before all tests."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
