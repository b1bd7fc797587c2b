"""A rank's queries, keys and values are found in tensors that hold them group by group."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from text_generation_common.models.config import read_config
from text_generation_common.models.names import QkvLayout
from text_generation_server.models.decoder import qkv_parts
from text_generation_server.models.loading import LayerPart
from text_generation_server.models.parts import split_model

SIZE = 8


def rows_of(part: LayerPart) -> list[int]:
    rows = torch.tensor(part.rows)
    return (rows if part.picks is None else rows.view(-1, part.group)[:, part.picks].flatten()).tolist()


@pytest.mark.parametrize(("heads", "keys"), [(4, 1), (4, 2), (8, 2), (4, 4)])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_rank_picks_its_heads_of_the_groups(
    tmp_path: Path, heads: int, keys: int, size: int, interleaved: bool
) -> None:
    raw = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": heads * SIZE, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": keys,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path)
    config = replace(config, names=replace(config.names, qkv=QkvLayout.groups))
    rope = config.rules[0].rope
    assert rope is not None
    rope = replace(rope, interleaved=interleaved)
    order = [*range(0, SIZE, 2), *range(1, SIZE, 2)] if interleaved else list(range(SIZE))
    of_key = heads // keys

    def rows(place: int, numbers: list[int]) -> list[int]:
        return [place * SIZE + number for number in numbers]

    for rank in range(size):
        split = split_model(config, rank, size, 320)
        queries, key, value = qkv_parts(config, rope, split, config.names.layer(0))
        places = [head // of_key * (of_key + 2) + head % of_key for head in split.query_heads]
        assert rows_of(queries) == [row for place in places for row in rows(place, order)]
        first_keys = [group * (of_key + 2) + of_key for group in split.kv_heads]
        assert rows_of(key) == [row for place in first_keys for row in rows(place, order)]
        assert rows_of(value) == [row for place in first_keys for row in rows(place + 1, list(range(SIZE)))]
