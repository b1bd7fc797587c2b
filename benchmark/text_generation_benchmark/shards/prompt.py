"""The prompt of all requests: Latin filler text, repeated or cut to a number of tokens."""

from itertools import cycle, islice

from text_generation_router.errors import StartError
from text_generation_router.scheduling.share import Share
from text_generation_router.text.model_files import find_model_files
from text_generation_router.text.tokens.tokenization import TextTokenizer

TEXT = (
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor incididunt ut labore et dolore"
    " magna aliqua. Ut enim ad minim veniam, quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo"
    " consequat. Duis aute irure dolor in reprehenderit in voluptate velit esse cillum dolore eu fugiat nulla pariatur."
    " Excepteur sint occaecat cupidatat non proident, sunt in culpa qui officia deserunt mollit anim id est laborum. "
)


async def prompt_ids(tokenizer_name: str, revision: str, length: int) -> tuple[int, ...]:
    """Token ids of the prompt. Raises StartError if there is no such tokenizer."""
    tokenizer = TextTokenizer.load(find_model_files(tokenizer_name, revision).folder, workers=1, max_waiting=1)
    try:
        ids = (await tokenizer.encode(TEXT, True, Share())).values
    finally:
        tokenizer.close()
    if not ids:
        raise StartError(
            f"the tokenizer of `{tokenizer_name}` encodes text to no tokens: pass the model itself to --tokenizer-name"
        )
    return tuple(islice(cycle(ids), length))
