"""Names for cached tokens that fronts and engines agree on: a hash for each whole block of BLOCK_TOKENS tokens.

A hash is 8 bytes of keyed BLAKE2b over the hash before it and the block's token ids, as 32-bit integers in
little-endian order. So it stands for all tokens from the first to the end of its block. Before the first block comes
the hash of the namespace. All processes of a deployment have the same key; without it, a hash says nothing about its
tokens.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from text_generation_router.scheduling.request import Namespace

Ids = npt.NDArray[np.int32]

BLOCK_TOKENS = 64
HASH_BYTES = 8
KEY_BYTES = (16, 64)  # fewest and most bytes of a key: fewer can be guessed, more BLAKE2b does not take

_BLOCK_BYTES = 4 * BLOCK_TOKENS
_NAMESPACE = b"namespace"  # keeps hashes of namespaces apart from those of blocks


class BlockHasher:
    """Makes the hashes of one deployment. ValueError: `key` is too short or too long."""

    def __init__(self, key: bytes) -> None:
        fewest, most = KEY_BYTES
        if not fewest <= len(key) <= most:
            raise ValueError(f"a key of {len(key)} bytes for hashes of blocks: give it {fewest} to {most}")
        self._key = key
        self._empty = blake2b(digest_size=HASH_BYTES, key=key)  # copied for each block: its key is read in already

    def root(self, namespace: Namespace) -> int:
        """The hash before the first block."""
        digest = blake2b(digest_size=HASH_BYTES, key=self._key, person=_NAMESPACE)
        for part in namespace:
            text = part.encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "little") + text)
        return int.from_bytes(digest.digest(), "little")

    def blocks(self, before: int, ids: Ids) -> list[int]:
        """The hashes of the whole blocks of `ids`, which follow the block or root whose hash is `before`."""
        data = ids.astype("<i4", copy=False).tobytes()
        digest, digests = before.to_bytes(HASH_BYTES, "little"), []
        copy = self._empty.copy
        for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            state = copy()
            state.update(digest + data[start : start + _BLOCK_BYTES])
            digest = state.digest()
            digests.append(digest)
        hashes: list[int] = np.frombuffer(b"".join(digests), "<u8").tolist()
        return hashes


class HistoryHashes:
    """The hashes of one request's tokens, prompt and output. The history only grows."""

    __slots__ = ("_hasher", "_root", "hashes")

    def __init__(self, hasher: BlockHasher, namespace: Namespace, ids: Sequence[int] | Ids = ()) -> None:
        self.hashes: list[int] = []
        self._hasher = hasher
        self._root = hasher.root(namespace)
        self.grow(ids)

    def grow(self, history: Sequence[int] | Ids) -> None:
        """Hashes the blocks that are new in `history`, which begins with all tokens given before."""
        known = len(self.hashes) * BLOCK_TOKENS
        if len(history) >= known + BLOCK_TOKENS:
            new = np.asarray(history[known:], dtype=np.int32)
            self.hashes += self._hasher.blocks(self.hashes[-1] if self.hashes else self._root, new)
