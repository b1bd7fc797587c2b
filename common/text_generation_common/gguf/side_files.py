"""Makes, of the header of a GGUF file, the small files that other models have beside their weights. Launcher, router,
engine and shards read them as they read those of a folder: `model_files.read_model_file` asks here if the folder is a
GGUF file.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from text_generation_common.gguf.config import config_json
from text_generation_common.gguf.container import GgufHeader, read_header
from text_generation_common.gguf.generation import generation_config, tokenizer_config
from text_generation_common.gguf.tokenizer import tokenizer_json

# By the file's name: what makes its JSON. None: the model has no such file.
MADE: Mapping[str, Callable[[GgufHeader], Mapping[str, Any] | None]] = {
    "config.json": config_json,
    "generation_config.json": generation_config,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}


def has_side_file(path: Path) -> bool:
    """Whether a GGUF file, `path` without its last part, tells what this file holds."""
    return path.name in MADE


def side_file(path: Path) -> bytes | None:
    """The content of `file.gguf/config.json`, for example; None if there is none. WeightsError if the header
    is broken."""
    if path.name not in MADE:
        return None
    made = MADE[path.name](read_header(path.parent))
    return None if made is None else json.dumps(made, ensure_ascii=False).encode(errors="replace")
