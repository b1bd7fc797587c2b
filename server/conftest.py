"""Lets Triton's kernels run in its interpreter when there is no GPU. The variable must be set before triton is
imported, which transformers does while a test runs. pytest reads this file before all tests.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
