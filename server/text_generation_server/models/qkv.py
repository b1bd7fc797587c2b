"""Where the files have the queries, keys and values of a rank's heads."""

from text_generation_common.models.architecture import ModelConfig
from text_generation_common.models.names import LayerNames, QkvLayout
from text_generation_common.models.rope_config import Rope
from text_generation_server.layers.rotary import kernel_order
from text_generation_server.models.loading import LayerPart, stacked
from text_generation_server.models.split import Split


def qkv_parts(config: ModelConfig, rope: Rope | None, split: Split, names: LayerNames) -> list[LayerPart]:
    """This rank's queries, keys and values, with the numbers of each query and key head in the kernels' order."""
    order = kernel_order(rope, config.head_size)
    if config.names.qkv is QkvLayout.groups:
        return _of_groups(config, order, split, names)
    size = config.head_size
    queries, keys, values = stacked(
        (names.queries, config.num_heads * size, features(split.query_heads, size)),
        (names.keys, config.num_kv_heads * size, features(split.kv_heads, size)),
        (names.values, config.num_kv_heads * size, features(split.kv_heads, size)),
    )
    if order is None:
        return [queries, keys, values]
    return [LayerPart(queries.name, queries.rows, order, size), LayerPart(keys.name, keys.rows, order, size), values]


def _of_groups(config: ModelConfig, order: list[int] | None, split: Split, names: LayerNames) -> list[LayerPart]:
    size, queries_of_key = config.head_size, config.num_heads // config.num_kv_heads
    group = (queries_of_key + 2) * size
    if len(split.query_heads) < queries_of_key:  # several ranks share a key head
        return _of_one_group(config, order, split, names)
    rows = features(split.kv_heads, group)
    numbers = order or list(range(size))
    queries = [head * size + number for head in range(queries_of_key) for number in numbers]
    key = [queries_of_key * size + number for number in numbers]
    value = [(queries_of_key + 1) * size + number for number in range(size)]
    return [
        LayerPart(name, rows, picks, group)
        for name, picks in ((names.queries, queries), (names.keys, key), (names.values, value))
    ]


def _of_one_group(config: ModelConfig, order: list[int] | None, split: Split, names: LayerNames) -> list[LayerPart]:
    """Some queries of a group, its key and its value."""
    size, queries_of_key = config.head_size, config.num_heads // config.num_kv_heads
    # Places of heads in the tensor. Each group before has a key and a value beside its queries.
    first = split.query_heads.start + 2 * split.kv_heads.start
    key = split.kv_heads.start * (queries_of_key + 2) + queries_of_key
    queries = range(first, first + len(split.query_heads))
    return [
        LayerPart(names.queries, features(queries, size), order, size),
        LayerPart(names.keys, features(range(key, key + 1), size), order, size),
        LayerPart(names.values, features(range(key + 1, key + 2), size)),
    ]


def features(heads: range, head_size: int) -> range:
    return range(heads.start * head_size, heads.stop * head_size)
