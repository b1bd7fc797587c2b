"""Lists the tensors of a model with their shapes, and checks that the weights files hold exactly the listed tensors."""

from collections.abc import Callable, Iterable

from text_generation_server.errors import ModelError
from text_generation_server.models.architecture import ModelConfig
from text_generation_server.models.names import LayerNames
from text_generation_server.weights.formats import BUFFERS


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of a model, by name."""
    hidden, names = config.hidden_size, config.names
    found: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (config.vocab_size, hidden)}
    if not config.tie_word_embeddings:
        found[f"{names.head}.weight"] = (config.vocab_size, hidden)
    found[f"{names.norm}.weight"] = (hidden,)
    for i in range(config.num_layers):
        found |= _layer_shapes(config, names.layer(i))
    return found


def _layer_shapes(config: ModelConfig, names: LayerNames) -> dict[str, tuple[int, ...]]:
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    linears = {
        names.queries: (queries, hidden, config.attention_bias),
        names.keys: (keys, hidden, config.attention_bias),
        names.values: (keys, hidden, config.attention_bias),
        names.attention_output: (hidden, queries, config.attention_bias),
        names.gate: (wide, hidden, config.mlp_bias),
        names.up: (wide, hidden, config.mlp_bias),
        names.down: (hidden, wide, config.mlp_bias),
    }
    found: dict[str, tuple[int, ...]] = {}
    for name, (outputs, inputs, has_bias) in linears.items():
        found[f"{name}.weight"] = (outputs, inputs)
        if has_bias:
            found[f"{name}.bias"] = (outputs,)
    for name in (names.attention_norm, names.mlp_norm):
        found[f"{name}.weight"] = (hidden,)
    return found


def check_tensors(config: ModelConfig, names: Iterable[str], shape_of: Callable[[str], tuple[int, ...] | None]) -> None:
    """Checks all tensors. ModelError for the first tensor that is missing, has another shape, or belongs to another
    kind of model. Reads no weights. Every rank checks whole tensors, of which it later reads a part.
    """
    expected = shapes(config)
    for name, shape in expected.items():
        _check_shape(name, shape, shape_of(name))
    for name in names:
        # The file of a tied model may still contain the model's head: see Llama.
        if name == f"{config.names.head}.weight":
            _check_shape(name, expected[f"{config.names.embedding}.weight"], shape_of(name))
        elif name not in expected and not BUFFERS.search(name):
            raise ModelError(
                f"the weights files have a tensor {ascii(name)[1:-1]}, which a {config.model_type} with this"
                " config.json does not have: the weights belong to another config.json, or to another kind of model"
            )


def _check_shape(name: str, expected: tuple[int, ...], stored: tuple[int, ...] | None) -> None:
    if stored is None:
        raise ModelError(f"the weights files have no tensor {name}: do they belong to this config.json?")
    if stored != expected:
        raise ModelError(
            f"the tensor {name} has the shape {list(stored)} in the weights files, and config.json makes it"
            f" {list(expected)}: do the weights belong to this config.json?"
        )
