"""Checks a model's tokenizer.json and its chat templates, in a process with limits, while a server starts:

    python -m text_generation_router.text.templates.file_check FOLDER [TOKENIZER_CONFIG]

The verdict is the router's own, which loads the files with the same functions, and which starts seconds later.
"""

from pathlib import Path

from text_generation_common.weights.child import limit_reader, main_of
from text_generation_common.weights.tokenizer_files import FILE, probe, unreadable
from text_generation_router.errors import StartError
from text_generation_router.text.templates.files import load_chat_template


def check(folder: Path, tokenizer_config: Path | None = None) -> None:
    """StartError if the router could not use a file."""
    limit_reader([folder / FILE])
    template = load_chat_template(folder, None if tokenizer_config is None else str(tokenizer_config))
    if template is not None:
        template.compile()
    try:
        probe(folder / FILE)
    except BaseException as error:  # tokenizers raises bare Exception, and panics of Rust code are not even that
        raise StartError(unreadable(folder / FILE, error)) from error


if __name__ == "__main__":
    main_of(check)
