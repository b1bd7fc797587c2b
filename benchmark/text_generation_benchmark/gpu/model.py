"""The Llama the check serves: config.json and a tokenizer, no weights; and what its steps have to read and compute."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from text_generation_benchmark.checkpoint import END_OF_TEXT, Shape, with_fillers

LLAMA_8B = Shape(
    hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocabulary=128256, max_positions=8192
)
REHEARSED = Shape(hidden=128, intermediate=320, layers=2, heads=4, kv_heads=2, vocabulary=4000, max_positions=1024)
ITEM_BYTES = 2  # of bfloat16


def head_size(shape: Shape) -> int:
    return shape.hidden // shape.heads


def layer_weights(shape: Shape) -> int:
    """Numbers in the products of one layer."""
    attention = (2 * shape.heads + 2 * shape.kv_heads) * head_size(shape) * shape.hidden
    return attention + 3 * shape.hidden * shape.intermediate


def weight_bytes(shape: Shape) -> int:
    """Read by every decode step: all products, the head's among them, and of the embedding next to nothing."""
    return ITEM_BYTES * (shape.layers * layer_weights(shape) + shape.vocabulary * shape.hidden)


def kv_bytes(shape: Shape) -> int:
    """Of one token of context, read by every decode step of its row."""
    return ITEM_BYTES * shape.layers * 2 * shape.kv_heads * head_size(shape)


def prefill_flops(shape: Shape, tokens: int) -> int:
    """Of a whole prompt, with logits of its last token alone."""
    products = 2 * tokens * shape.layers * layer_weights(shape) + 2 * shape.vocabulary * shape.hidden
    return products + shape.layers * attention_flops(shape, tokens)


def attention_flops(shape: Shape, tokens: int) -> int:
    """Of a whole prompt in one layer: scores and weighted values of what each token sees."""
    return 4 * shape.heads * head_size(shape) * tokens * (tokens + 1) // 2


def write_folder(out: Path, shape: Shape) -> None:
    """What `--load-format dummy` needs. Every id has a text: a model without training says any of them."""
    out.mkdir(parents=True, exist_ok=True)
    server = find_spec("text_generation_server")
    assert server is not None and server.submodule_search_locations is not None
    demo_model = Path(server.submodule_search_locations[0]) / "demo_model"
    tokenizer = json.loads((demo_model / "tokenizer.json").read_text())
    (out / "tokenizer.json").write_text(json.dumps(with_fillers(tokenizer, shape.vocabulary)))
    shutil.copy(demo_model / "tokenizer_config.json", out / "tokenizer_config.json")
    (out / "config.json").write_text(json.dumps(_config(shape), indent=2))


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": END_OF_TEXT,
    }
