"""transformers' `generate`, as a process of its own: `python -m text_generation_benchmark.peer DIR IN OUT CONCURRENCY…`

Prints one JSON line: seconds and tokens for each concurrency, as one batch of prompts of equal length.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

REPETITIONS = 3


def measure(model: LlamaForCausalLM, batch: int, input_tokens: int, new_tokens: int) -> float:
    """Seconds for one batch: the median of some repetitions, after a short one."""
    ids = torch.randint(10, 2000, (batch, input_tokens), generator=torch.Generator().manual_seed(batch))
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    model.generate(ids, max_new_tokens=4, min_new_tokens=4, **options)
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        out = model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
        times.append(time.perf_counter() - started)
        if out.shape[1] != input_tokens + new_tokens:
            raise RuntimeError("transformers made fewer tokens than asked for")
    return sorted(times)[REPETITIONS // 2]


def main() -> None:
    path, input_tokens, new_tokens, *concurrency = sys.argv[1:]
    model = LlamaForCausalLM.from_pretrained(Path(path), dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        seconds = {int(n): measure(model, int(n), int(input_tokens), int(new_tokens)) for n in concurrency}
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
