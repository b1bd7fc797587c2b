"""Finds a model's chat templates and special tokens in its files."""

from pathlib import Path
from typing import Any

from text_generation_common.file_names import TEMPLATES
from text_generation_common.model_files import MissingFileError, ModelFileError, find_json_object, read_model_file
from text_generation_router.errors import StartError
from text_generation_router.text.templates.chat_template import ChatTemplate

# The special tokens that every tokenizer of transformers knows by name.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT = "default"
MAX_TEMPLATES = 16  # maximum number of templates of one model

Templates = dict[str, str]


def load_chat_template(folder: Path, tokenizer_config_path: str | None = None) -> ChatTemplate | None:
    """The model's chat templates, or None. They are taken from the first of these that has any: `chat_template.jinja`
    with `additional_chat_templates/*.jinja`, `chat_template.json`, `tokenizer_config.json`. Transformers has the same
    order; its tokenizers do not read `chat_template.json`, its processors do.

    `tokenizer_config_path` replaces all of them. StartError for a file that cannot be used.
    """
    try:
        if tokenizer_config_path is not None:
            config = find_json_object(Path(tokenizer_config_path))
            if config is None:
                raise StartError(f"--tokenizer-config-path {tokenizer_config_path} is not a file: check the path")
            templates, tokens = _templates_of(config), special_tokens(config)
        else:
            config = find_json_object(folder / "tokenizer_config.json") or {}
            templates = _model_templates(folder, config)
            if "added_tokens_decoder" not in config:  # an older tokenizer, whose tokens are in a file of their own
                config |= find_json_object(folder / "special_tokens_map.json") or {}
            tokens = special_tokens(config)
    except ModelFileError as error:
        raise StartError(str(error)) from None
    source = templates.pop(DEFAULT, None)
    return None if source is None else ChatTemplate(source, tokens, templates)


def _model_templates(folder: Path, config: dict[str, Any]) -> Templates:
    """`config`: the content of the folder's tokenizer_config.json."""
    others = _templates_of(find_json_object(folder / "chat_template.json") or {}) or _templates_of(config)
    files = {path.stem: path for path in sorted(folder.glob(TEMPLATES + "*.jinja"))[:MAX_TEMPLATES]}
    files[DEFAULT] = folder / "chat_template.jinja"
    read = {name: source for name, path in files.items() if (source := _jinja_file(path)) is not None}
    if read and DEFAULT not in read and DEFAULT in others:
        read[DEFAULT] = others[DEFAULT]
    return read or others


def _templates_of(config: dict[str, Any]) -> Templates:
    """The config's `chat_template`, by name: one text is the default, several are a list of named ones."""
    template = config.get("chat_template")
    if isinstance(template, str):
        return {DEFAULT: template}
    entries = template if isinstance(template, list) else ()
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _jinja_file(path: Path) -> str | None:
    try:
        return read_model_file(path).decode()
    except MissingFileError:
        return None
    except UnicodeDecodeError as error:
        raise StartError(f"{path} is not UTF-8 ({error}): repair it, or download it again") from None


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens by name, as `tokenizer.special_tokens_map` of transformers."""
    own = {name: token for name, token in config.items() if name.endswith("_token") and isinstance(token, str)}
    extra = config.get("extra_special_tokens")
    tokens = {name: config.get(name) for name in SPECIAL_TOKENS} | own | (extra if isinstance(extra, dict) else {})
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
