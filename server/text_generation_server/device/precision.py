"""How exactly a device computes products of matrices."""

import torch


def sum_products_in_float32(device: torch.device) -> None:
    """From now on cuBLAS adds up products of half precision in float32. By default, where it splits a long sum over
    several programs, it may add up the programs' results in half precision."""
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
