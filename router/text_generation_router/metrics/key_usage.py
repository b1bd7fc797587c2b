"""What the requests of each API key use, on /metrics: by the key's name in the key file, or by a salted digest.

All readers of the page see the names, so a key without a name has a digest with a secret salt: a label can then
not be compared with a guessed key. A server without keys has none of these series.
"""

import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b

from prometheus_client import CollectorRegistry, Counter

MAX_NAMES = 25
OTHER = "other"  # the name of all keys beyond MAX_NAMES names
DIGEST_BYTES, MAX_SALT_BYTES = 6, 64
COUNTERS = {
    "tgi_key_requests": "Requests received, by the name of their API key",
    "tgi_key_prompt_tokens": "Prompt tokens of texts that have begun, by the name of the API key",
    "tgi_key_cached_tokens": "Those of the prompt tokens that the prefix cache had, by the name of the API key",
    "tgi_key_output_tokens": "Tokens made, those of texts that did not end included, by the name of the API key",
}


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """The counters of one name."""

    requests: Counter
    prompt_tokens: Counter
    cached_tokens: Counter
    output_tokens: Counter

    def count_text(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        self.prompt_tokens.inc(prompt_tokens)
        self.cached_tokens.inc(cached_tokens)
        self.output_tokens.inc(output_tokens)


# The usage to which the HTTP request in progress adds; None: the server has no keys, or the route needs none.
key_usage: ContextVar[KeyUsage | None] = ContextVar("key_usage", default=None)


def salt_of(shared_key: bytes, is_alone: bool) -> bytes | None:
    """The salt of the digests: the fronts that share a page have to agree on it. None: they have no common secret."""
    return shared_key[:MAX_SALT_BYTES] or (secrets.token_bytes(16) if is_alone else None)


def labels_of(names: Mapping[bytes, str], salt: bytes | None) -> dict[bytes, str]:
    """The label of each key, by its digest. `names`: names of the keys by their digests, "" for a key without one. If
    there are more than MAX_NAMES labels, keys with names have theirs first."""
    labels = {digest: name or _salted(digest, salt) for digest, name in names.items()}
    named_first = dict.fromkeys([*filter(None, names.values()), *labels.values()])
    shown = [label for label in named_first if label != OTHER][:MAX_NAMES]
    return {digest: label if label in shown else OTHER for digest, label in labels.items()}


def _salted(digest: bytes, salt: bytes | None) -> str:
    if salt is None:
        return OTHER
    return blake2b(digest, digest_size=DIGEST_BYTES, key=salt, person=b"key usage").hexdigest()


def add_usages(names: Mapping[bytes, str], salt: bytes | None, registry: CollectorRegistry) -> dict[bytes, KeyUsage]:
    """Adds the counters to the registry, with all their labels, and returns the usage of each key by its digest."""
    counters = [Counter(name, text, ["key"], registry=registry) for name, text in COUNTERS.items()]
    return {
        digest: KeyUsage(*(counter.labels(key=label) for counter in counters))
        for digest, label in labels_of(names, salt).items()
    }
