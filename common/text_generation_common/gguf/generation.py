"""What a GGUF file says of chats and of sampling, as tokenizer_config.json and generation_config.json say it."""

import logging
from collections.abc import Mapping
from typing import Any

from text_generation_common.gguf.container import GgufHeader, shown
from text_generation_common.gguf.vocabulary import read_vocabulary

logger = logging.getLogger(__name__)

TEMPLATE, DEFAULT = "tokenizer.chat_template", "default"
CHOSEN = (DEFAULT, "tool_use", "rag")  # names of templates that requests may choose
SAMPLING = "general.sampling."
# Names in generation_config.json. Files with one of the first four are for sampling: they have no key that says so.
SAMPLED: Mapping[str, str] = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
RECOMMENDED: Mapping[str, str] = {**SAMPLED, "penalty_repeat": "repetition_penalty"}
MAX_MENTIONED = 10


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """Special tokens, and the chat templates by name. WeightsError for values of another type."""
    vocabulary = read_vocabulary(header)
    tokens = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"}
    named = [key for key in header.metadata if key.startswith(f"{TEMPLATE}.")]
    templates = {key.removeprefix(f"{TEMPLATE}."): header.text(key) for key in named}
    if TEMPLATE in header.metadata:
        templates[DEFAULT] = header.text(TEMPLATE)
    _mention(header, [f"{TEMPLATE}.{name}" for name in templates if name not in CHOSEN])
    return {
        **{key: vocabulary.special_text(name) for key, name in tokens.items()},
        "chat_template": [{"name": name, "template": text} for name, text in templates.items()],
        "added_tokens_decoder": {},
    }


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """The tokens that end an answer, and the sampling parameters that the file recommends."""
    found = {
        name: _as_written(header.number(f"{SAMPLING}{key}"))
        for key, name in RECOMMENDED.items()
        if f"{SAMPLING}{key}" in header.metadata
    }
    is_sampled = not found.keys().isdisjoint(SAMPLED.values())
    return {"eos_token_id": read_vocabulary(header).end_ids, "do_sample": is_sampled, **found}


def _mention(header: GgufHeader, others: list[str]) -> None:
    """Logs keys of templates and of sampling that have no effect. Routers read the templates once, when they start."""
    known = {f"{SAMPLING}{key}" for key in RECOMMENDED}
    names = others + [key for key in header.metadata if key.startswith(SAMPLING) and key not in known]
    if names:
        listed = ", ".join(map(shown, names[:MAX_MENTIONED])) + (", …" if len(names) > MAX_MENTIONED else "")
        logger.info("%s has keys that have no effect: %s", header.path, listed)


def _as_written(value: float) -> float:
    """The shortest number that has become this float32: 0.6, not 0.6000000238418579."""
    return value if isinstance(value, int) else float(f"{value:.7g}")
