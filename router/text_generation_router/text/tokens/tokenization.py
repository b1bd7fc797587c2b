"""Turns text into token ids, in threads that are shared fairly between owners and tenants."""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Self, TypeVar

import orjson
from tokenizers import Encoding, Tokenizer

from text_generation_common.model_files import MissingFileError, ModelFileError, read_model_file
from text_generation_common.weights.tokenizer_files import identity_of, probe_tokenizer, unreadable
from text_generation_router.errors import StartError, ValidationError
from text_generation_router.fairness import FairThreads
from text_generation_router.offload.malloc import give_back_memory
from text_generation_router.scheduling.request import Share
from text_generation_router.text.tokens.certain_cuts import Joints, TextPart, cut_into_parts
from text_generation_router.text.tokens.length_bound import max_chars_per_token

T = TypeVar("T")
EncodeBatch = Callable[..., list[Encoding]]

# Characters of a part, if the text can be cut: about 10 ms of work, after which the thread may serve another tenant.
PART_CHARS = 16_384
# Characters above which a part that could not be cut is large. Such a part takes seconds, and up to 150 bytes of memory
# for each of its bytes. So large parts share one thread of their own, and freed memory is returned to the system after
# each.
LARGE_PART_CHARS = 4 * PART_CHARS
# A text that is too long is counted to its end, for the error's text, if it has at most COUNTED times as many tokens as
# the caller accepts.
COUNTED = 4
# Characters of the largest part of which `spans` lists the tokens, at 500 bytes of memory for each token.
MAX_SPANS_PART_CHARS = 4 * LARGE_PART_CHARS


@dataclass(frozen=True, slots=True)
class Span:
    """One token of a text, and the range of UTF-8 bytes that it covers: empty for a special token."""

    id: int
    text: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Ids:
    """The token ids of a text. If the text has more tokens than the caller accepts, `values` is empty, and `count` is
    the number of tokens, or a lower bound if not `is_exact`."""

    values: tuple[int, ...]
    count: int
    is_exact: bool = True

    @classmethod
    def of(cls, values: tuple[int, ...]) -> Self:
        return cls(values, len(values))


class TextTokenizer:
    """A tokenizer that encodes in threads with tokenizers' batch functions, which release the interpreter lock.
    `encode` would hold the lock and stall every stream while it reads a long prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_chars_per_token: int | None,
        joints: Joints | None,
        workers: int,
        max_waiting: int,
        part_chars: int = PART_CHARS,
        max_part_chars: int | None = None,
    ) -> None:
        """`max_waiting`: most texts of one tenant that may wait for one of the `workers` threads. `max_part_chars`:
        characters of the largest part that is accepted if it cannot be cut; None: no limit.
        """
        self.tokenizer = tokenizer
        self.max_chars_per_token = max_chars_per_token
        self._joints = joints
        self._part_chars = part_chars
        self._max_part_chars = max_part_chars
        self._threads = FairThreads(workers, max_waiting, "tokenize")
        self._large = FairThreads(1, max_waiting, "tokenize-large")

    @classmethod
    def load(
        cls, folder: Path, workers: int, max_waiting: int, max_part_chars: int | None = None, probed: str | None = None
    ) -> Self:
        """Loads the model's tokenizer. Raises StartError if the model has no fast tokenizer. `probed`: identity of the
        file for which a probe has just succeeded; None: there was none."""
        path = folder / "tokenizer.json"
        try:
            # Read as bytes: tokenizer.json is UTF-8 in every locale.
            content = read_model_file(path)
            if identity_of(path) != probed:
                probe_tokenizer(path)
            tokenizer = Tokenizer.from_buffer(content)
            return cls.of(tokenizer, workers, max_waiting, max_part_chars=max_part_chars)
        except MissingFileError:
            raise StartError(
                f"{folder} has no tokenizer.json, and slow tokenizers are not supported; "
                "write one with transformers' AutoTokenizer(...).save_pretrained(...)"
            ) from None
        except ModelFileError as error:
            raise StartError(str(error)) from None
        except Exception as error:  # tokenizers raises bare Exception
            raise StartError(unreadable(path, error)) from error

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        workers: int,
        max_waiting: int,
        part_chars: int = PART_CHARS,
        max_part_chars: int | None = None,
    ) -> Self:
        content: dict[str, Any] = orjson.loads(tokenizer.to_str())
        # This server checks the length of prompts: settings in the file to truncate or pad would falsify it.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        bound, joints = max_chars_per_token(content), Joints.of(tokenizer, content)
        return cls(
            tokenizer=tokenizer,
            max_chars_per_token=bound,
            joints=joints,
            workers=workers,
            max_waiting=max_waiting,
            part_chars=part_chars,
            max_part_chars=max_part_chars,
        )

    async def encode(
        self, text: str, add_special_tokens: bool, share: Share, keep_last: int | None = None, most: int | None = None
    ) -> Ids:
        """The token ids of `text`; only the last `keep_last` ids if given. If `text` has more than `most` ids, only
        their number is returned (see Ids).
        """
        parts = await self._parts(text, share)
        if self._max_part_chars is not None:
            _refuse_large_parts(parts, self._max_part_chars)
        if len(parts) == 1:
            return await self._in_turn(
                parts[0], share, lambda: self._ids_of_whole(text, add_special_tokens, keep_last, most)
            )
        assert self._joints is not None
        front, back = (self._joints.front, self._joints.back) if add_special_tokens else ((), ())
        found: list[list[int]] = []
        count = len(back)
        for part in reversed(parts):
            ids = await self._in_turn(part, share, partial(self._ids_of_part, text, part))
            found.append(ids)
            count += len(ids)
            if keep_last is not None and count >= keep_last:
                break
            if keep_last is None and most is not None and count > COUNTED * most:
                return Ids((), count, is_exact=False)
        if keep_last is None and most is not None and len(front) + count > most:
            return Ids((), len(front) + count)
        values = (*front, *chain.from_iterable(reversed(found)), *back)
        return Ids.of(values if keep_last is None else values[-keep_last:])

    async def encode_words(self, words: Sequence[str], share: Share) -> list[tuple[int, ...]]:
        """The token ids of each of a few short texts, without special tokens around them."""
        encode = self.tokenizer.encode_batch_fast

        def work() -> list[tuple[int, ...]]:
            return [tuple(_first(encode, word, add_special_tokens=False).ids) for word in words]

        return await self._threads.run(share, sum(map(len, words)), work)

    async def spans(
        self, text: str, share: Share, use: Callable[[list[Span]], T], add_special_tokens: bool = True
    ) -> AsyncGenerator[T, None]:
        """Calls `use`, in a thread, with the tokens of each part of the text, and yields the results. Raises
        ValidationError, before the first result, if a part is too large."""
        parts = await self._parts(text, share)
        _refuse_large_parts(parts, MAX_SPANS_PART_CHARS)
        first_byte = 0
        for part in parts:
            work = partial(self._use_spans, text, part, first_byte, use=use, add_special_tokens=add_special_tokens)
            used, first_byte = await self._in_turn(part, share, work)
            yield used

    def close(self) -> None:
        self._threads.close()
        self._large.close()

    async def _parts(self, text: str, share: Share) -> list[TextPart]:
        """The parts of the text, at least one. A text that cannot be cut is one part."""
        if self._joints is None or len(text) <= self._part_chars:
            return [TextPart(0, len(text), False)]
        return await self._threads.run(share, self._part_chars, lambda: cut_into_parts(text, self._part_chars))

    async def _in_turn(self, part: TextPart, share: Share, work: Callable[[], T]) -> T:
        chars = part.stop - part.start
        if chars <= LARGE_PART_CHARS:
            return await self._threads.run(share, chars, work)

        def work_and_tidy() -> T:
            try:
                return work()
            finally:
                give_back_memory()

        return await self._large.run(share, chars, work_and_tidy)

    def _ids_of_whole(self, text: str, add_special_tokens: bool, keep_last: int | None, most: int | None) -> Ids:
        # The "fast" function keeps no offsets and token texts: freeing them would stall other threads for 80 ms per MB.
        encoding = _first(self.tokenizer.encode_batch_fast, text, add_special_tokens)
        count = len(encoding)
        if keep_last is not None:
            return Ids.of(tuple(encoding.ids[-keep_last:]))
        return Ids((), count) if most is not None and count > most else Ids(tuple(encoding.ids), count)

    def _ids_of_part(self, text: str, part: TextPart) -> list[int]:
        encoding = _first(self.tokenizer.encode_batch_fast, text[part.start : part.stop], add_special_tokens=False)
        return encoding.ids[self._num_context_ids(text, part) :]

    def _use_spans(
        self,
        text: str,
        part: TextPart,
        first_byte: int,
        use: Callable[[list[Span]], T],
        add_special_tokens: bool,
    ) -> tuple[T, int]:
        """(The result of `use` for the part, the byte offset in the text after the part.) With `add_special_tokens` the
        first and the last part include the special tokens that every text gets.
        """
        whole = part == TextPart(0, len(text), False)
        piece = text[part.start : part.stop]
        start = first_byte - part.has_context  # minus 1 for the context, which is one ASCII letter and so one byte
        spans = _spans(
            _first(self.tokenizer.encode_batch, piece, add_special_tokens=whole and add_special_tokens), piece, start
        )
        spans = spans[self._num_context_ids(text, part) :]
        if add_special_tokens and not whole:
            assert self._joints is not None
            front = self._joints.front if part.start == 0 else ()
            back = self._joints.back if part.stop == len(text) else ()
            spans = [*map(_special, front), *spans, *map(_special, back)]
        return use(spans), start + len(piece.encode())

    def _num_context_ids(self, text: str, part: TextPart) -> int:
        if not part.has_context:
            return 0
        assert self._joints is not None
        return self._joints.ids_of_letter[text[part.start]]


def _refuse_large_parts(parts: Sequence[TextPart], most: int) -> None:
    largest = max(part.stop - part.start for part in parts)
    if largest > most:
        raise ValidationError(
            f"`inputs` has {largest} characters without a place where they can be cut before they are tokenized "
            f"(a space between two letters, for most tokenizers), at most {most} are supported here",
            "inputs",
        )


def _first(encode_batch: EncodeBatch, text: str, add_special_tokens: bool) -> Encoding:
    try:
        return encode_batch([text], add_special_tokens=add_special_tokens)[0]
    except Exception as error:  # tokenizers raises bare Exception
        raise ValidationError(f"tokenizer error {error}", "inputs") from error


def _special(token_id: int) -> Span:
    return Span(token_id, "", 0, 0)


def _spans(encoding: Encoding, text: str, first_byte: int) -> list[Span]:
    """Converts offsets: tokenizers counts characters, TGI's answer has byte offsets."""
    length = len(text) + 1
    byte_at = range(length) if text.isascii() else [0, *accumulate(len(char.encode()) for char in text)]
    return [
        _special(id) if special else Span(id, text[start:stop], first_byte + byte_at[start], first_byte + byte_at[stop])
        for id, (start, stop), special in zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True)
    ]
