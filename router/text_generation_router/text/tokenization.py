"""Text to ids, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self, TypeVar

import orjson
from tokenizers import Encoding, Tokenizer

from text_generation_launcher.model_files import read_model_file
from text_generation_router.errors import StartError, ValidationError
from text_generation_router.text.length_bound import max_chars_per_token

T = TypeVar("T")
EncodeBatch = Callable[..., list[Encoding]]


@dataclass(frozen=True, slots=True)
class Span:
    """One token of a text and the bytes (UTF-8) it covers; special tokens cover none."""

    id: int
    text: str
    start: int
    stop: int


class TextTokenizer:
    """Encodes in `workers` threads, by the batch functions: they release the GIL, and `encode` would hold it and stall
    every stream while a long prompt is read."""

    def __init__(self, tokenizer: Tokenizer, max_chars_per_token: int | None, workers: int) -> None:
        self.tokenizer = tokenizer
        self.max_chars_per_token = max_chars_per_token
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, folder: Path, workers: int) -> Self:
        """Raises StartError if the model has no fast tokenizer."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise StartError(
                f"{folder} has no tokenizer.json, and slow tokenizers are not supported; "
                "write one with transformers' AutoTokenizer(...).save_pretrained(...)"
            )
        try:
            # Read as bytes: tokenizer.json is UTF-8 whatever the locale says.
            content = read_model_file(path)
            tokenizer = Tokenizer.from_buffer(content)
            bound = max_chars_per_token(orjson.loads(content))
        except Exception as error:  # tokenizers raises bare Exception
            raise StartError(f"{path} cannot be read as a tokenizer: {error}; download it again") from error
        # What a prompt may be is this server's decision; a file that truncates or pads would hide text from it.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, bound, workers)

    async def encode(self, text: str, add_special_tokens: bool, keep_last: int | None = None) -> tuple[int, ...]:
        """Token ids; the last `keep_last` of them if given."""

        def work() -> tuple[int, ...]:
            # "Fast" keeps neither offsets nor token texts, whose release alone stalls others for 80 ms at 1 MB.
            ids = self._first(self.tokenizer.encode_batch_fast, text, add_special_tokens).ids
            return tuple(ids if keep_last is None else ids[-keep_last:])

        return await self.in_thread(work)

    async def spans(self, text: str) -> list[Span]:
        return await self.in_thread(lambda: _spans(self._first(self.tokenizer.encode_batch, text, True), text))

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _first(encode_batch: EncodeBatch, text: str, add_special_tokens: bool) -> Encoding:
        try:
            return encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except Exception as error:  # tokenizers raises bare Exception
            raise ValidationError(f"tokenizer error {error}") from error


def _spans(encoding: Encoding, text: str) -> list[Span]:
    """tokenizers counts characters, TGI's answer bytes."""
    byte_at = range(len(text) + 1) if text.isascii() else [0, *accumulate(len(char.encode()) for char in text)]
    return [
        Span(id, "", 0, 0) if special else Span(id, text[start:stop], byte_at[start], byte_at[stop])
        for id, (start, stop), special in zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True)
    ]
