"""Where the files have the queries, keys and values of a rank's heads."""

from text_generation_server.layers.rotary import Rope, kernel_order
from text_generation_server.models.architecture import ModelConfig
from text_generation_server.models.loading import Part, stacked
from text_generation_server.models.names import LayerNames, QkvLayout
from text_generation_server.models.split import Split


def qkv_parts(config: ModelConfig, rope: Rope | None, split: Split, names: LayerNames) -> list[Part]:
    """This rank's queries, keys and values, with the numbers of each query and key head in the kernels' order."""
    order = kernel_order(rope, config.head_size)
    if config.names.qkv is QkvLayout.groups:
        return _of_groups(config, order or list(range(config.head_size)), split, names)
    size = config.head_size
    queries, keys, values = stacked(
        (names.queries, config.num_heads * size, features(split.query_heads, size)),
        (names.keys, config.num_kv_heads * size, features(split.kv_heads, size)),
        (names.values, config.num_kv_heads * size, features(split.kv_heads, size)),
    )
    if order is None:
        return [queries, keys, values]
    return [Part(queries.name, queries.rows, order, size), Part(keys.name, keys.rows, order, size), values]


def _of_groups(config: ModelConfig, order: list[int], split: Split, names: LayerNames) -> list[Part]:
    size, queries_of_key = config.head_size, config.num_heads // config.num_kv_heads
    group = (queries_of_key + 2) * size
    rows = features(split.kv_heads, group)
    # If several ranks share a key head, each has some of its queries only.
    first = split.query_heads.start - split.kv_heads.start * queries_of_key
    own = range(first, first + len(split.query_heads) // len(split.kv_heads))
    queries = [head * size + number for head in own for number in order]
    key = [queries_of_key * size + number for number in order]
    value = [(queries_of_key + 1) * size + number for number in range(size)]
    return [
        Part(name, rows, picks, group)
        for name, picks in ((names.queries, queries), (names.keys, key), (names.values, value))
    ]


def features(heads: range, head_size: int) -> range:
    return range(heads.start * head_size, heads.stop * head_size)
