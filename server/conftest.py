"""Where there is no GPU, Triton's kernels are tested in its interpreter. It must know before anybody imports triton,
which transformers does while a test runs: this file is read before all tests."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
