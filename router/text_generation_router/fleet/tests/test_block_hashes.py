"""A block's hash stands for all tokens up to its end, its namespace and the deployment's key."""

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from text_generation_router.fleet.cache_news import BLOCK_TOKENS, BlockHasher, HistoryHashes

KEY = bytes(range(32))
HASHER = BlockHasher(KEY)


def test_a_hash_is_keyed_blake2b_over_the_hash_before_and_the_tokens() -> None:
    """The expected hashes are computed here step by step, so that fronts and engines of different versions agree."""
    ids = np.arange(2 * BLOCK_TOKENS, dtype=np.int32) + 100_000
    first, second = HASHER.blocks(HASHER.root(()), ids)
    before = first.to_bytes(8, "little")
    tokens = b"".join(int(token).to_bytes(4, "little") for token in ids[BLOCK_TOKENS:])
    digest = blake2b(before + tokens, digest_size=8, key=KEY).digest()
    assert second == int.from_bytes(digest, "little")


@given(lengths=st.lists(st.integers(0, 200), max_size=6))
def test_a_history_that_grows_has_the_hashes_of_the_whole(lengths: list[int]) -> None:
    ids = np.arange(sum(lengths), dtype=np.int32)
    growing = HistoryHashes(HASHER, ("a",))
    for end in np.cumsum(lengths, dtype=int):
        growing.grow(ids[:end])
    assert growing.hashes == HistoryHashes(HASHER, ("a",), tuple(ids.tolist())).hashes
    assert len(growing.hashes) == len(ids) // BLOCK_TOKENS


def test_texts_with_equal_first_tokens_have_equal_first_hashes_only() -> None:
    one = list(range(4 * BLOCK_TOKENS))
    other = [*one]
    other[2 * BLOCK_TOKENS] = 7
    first, second = (HistoryHashes(HASHER, (), ids).hashes for ids in (one, other))
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])


def test_namespaces_and_keys_have_hashes_of_their_own() -> None:
    ids = list(range(BLOCK_TOKENS))
    namespaces = [(), ("",), ("a", "b"), ("ab",), ("a", "", "b"), ("\udcff",)]
    hashes = {HistoryHashes(HASHER, namespace, ids).hashes[0] for namespace in namespaces}
    hashes.add(HistoryHashes(BlockHasher(KEY[::-1]), (), ids).hashes[0])
    assert len(hashes) == len(namespaces) + 1


@pytest.mark.parametrize("size", [0, 15, 65])
def test_a_key_of_the_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"a key of {size} bytes"):
        BlockHasher(bytes(size))
