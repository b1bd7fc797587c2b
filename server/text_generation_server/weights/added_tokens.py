"""Reads what the files beside tokenizer.model add to it: tokens, and the tokens around every text. The defaults are
those of transformers' LlamaTokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from text_generation_common.errors import WeightsError
from text_generation_common.model_files import ModelFileError, find_json_object
from text_generation_server.weights.sentencepiece import SentencePieces

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


@dataclass(frozen=True, slots=True)
class Additions:
    tokens: Mapping[int, AddedToken] = field(default_factory=dict)  # by id
    before: str | None = None  # the token before every text
    after: str | None = None


def read_additions(path: Path, model: SentencePieces) -> Additions:
    """WeightsError for a file that cannot be read, or has a value of another type."""
    config, special, added = (_object(path / name) for name in (CONFIG, MAP, ADDED))
    named = {text for values in (special, config) for name in values if (text := _token(values, name))}
    named |= {text for text in map(_text, special.get("additional_special_tokens") or []) if text}
    tokens: dict[int, AddedToken] = {}
    for content, id in added.items():
        tokens[_id(id, path / ADDED)] = AddedToken(content, special=content in named, normalized=False)
    for id, entry in (config.get("added_tokens_decoder") or {}).items():
        tokens[_id(id, path / CONFIG)] = _added(entry, path / CONFIG)
    texts = {}
    for name, id, default in (("bos", model.bos_id, True), ("eos", model.eos_id, False)):
        token = f"{name}_token"
        text = _token(config, token) if token in config else _token(special, token) or model.text(id)
        texts[name] = text if config.get(f"add_{token}", default) else None
    return Additions(tokens, texts["bos"], texts["eos"])


def _object(file: Path) -> dict[str, Any]:
    try:
        return find_json_object(file) or {}
    except ModelFileError as error:
        raise WeightsError(str(error)) from None


def _token(values: Mapping[str, Any], name: str) -> str | None:
    return _text(values.get(name)) if name.endswith("_token") else None


def _text(value: object) -> str | None:
    """A token is written as its text, or as an object with its text."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _id(value: object, where: Path) -> int:
    if not isinstance(value, int | str) or isinstance(value, bool) or not str(value).isdecimal():
        raise WeightsError(f"{where} has a token without a number: repair it, or download it again")
    return int(value)


def _added(entry: Any, where: Path) -> AddedToken:
    text = _text(entry) if isinstance(entry, dict) else None
    if text is None:
        raise WeightsError(f"{where} has a token without a text: repair it, or download it again")
    flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
    return AddedToken(text, normalized=False, **flags)
