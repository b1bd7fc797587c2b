"""Makes, of the header of a GGUF file, the small files that other models have beside their weights. Launcher, router,
engine and shards read them as they read those of a folder: `model_files.read_model_file` asks here if the folder is a
GGUF file.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from text_generation_common.errors import ModelError, WeightsError
from text_generation_common.gguf.config import architecture_of, config_json
from text_generation_common.gguf.container import GgufHeader, read_header, read_start
from text_generation_common.gguf.generation import generation_config, tokenizer_config
from text_generation_common.gguf.tokenizer import tokenizer_file
from text_generation_common.gguf.vocabulary import read_vocabulary

# By the file's name: what makes its content, or what its JSON says.
MADE: Mapping[str, Callable[[GgufHeader], Mapping[str, Any] | bytes]] = {
    "config.json": config_json,
    "generation_config.json": generation_config,
    "tokenizer.json": tokenizer_file,
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
    return made if isinstance(made, bytes) else json.dumps(made, ensure_ascii=False).encode(errors="replace")


def refuse_beginning(file_bytes: int, name: str, names: Sequence[str], path: Path) -> bool:
    """Examines the beginning of the file `name`, one of the parts `names` of a model, which arrives at `path`. Returns
    False as long as it does not hold the header. WeightsError for a model that cannot be served."""
    try:
        header = read_start(path, file_bytes)
        if header is None:
            return False
        if name == names[0]:
            architecture_of(header)
            read_vocabulary(header)
        if len(names) == 1:
            config_json(header)
    except (ModelError, WeightsError) as error:
        raise WeightsError(str(error).replace(str(path), name)) from None
    return True
