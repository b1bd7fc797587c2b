"""The load of a deployment: chats with shared system prompts, or prompts that share nothing."""

from dataclasses import dataclass
from math import pi

import numpy as np
import numpy.typing as npt

from text_generation_benchmark.simulation.stepped import END_TOKEN, TOKEN
from text_generation_benchmark.simulation.trace import Floats, Lengths, LogNormal

Ids = npt.NDArray[np.int32]

USER, ANSWER = LogNormal(150, 0.8, 8, 1000), LogNormal(150, 0.6, 1, 512)

# First ids of texts that are told apart by them; later ids may repeat.
FIRST_SYSTEM_ID, FIRST_TEXT_ID = 1_000_000, 2_000_000


@dataclass(frozen=True, slots=True)
class ChatLoad:
    """An arrival is the next turn of a chat that waits for no answer. A chat that has grown to `max_tokens` begins
    again, with another system prompt. `shares=False`: each arrival is a new text as long as such a turn. `exact`: a
    request asks for as many tokens as it gets; otherwise for `max_new_tokens`, and its text ends earlier.
    """

    num_systems: int = 12
    system_tokens: int = 1200
    num_chats: int = 400
    user: Lengths = USER
    output: Lengths = ANSWER
    max_tokens: int = 5500
    max_new_tokens: int = 512
    shares: bool = True
    exact: bool = False

    def __str__(self) -> str:
        if not self.shares:
            return f"prompts that share nothing, as long as those of chats of up to {self.max_tokens:,} tokens"
        return (
            f"{self.num_systems} system prompts of {self.system_tokens:,} tokens, {self.num_chats:,} chats of up to"
            f" {self.max_tokens:,} tokens"
        )


@dataclass(frozen=True, slots=True)
class ChatText:
    """Token ids as an array, and as a tuple whose numbers all texts share, to save memory."""

    array: Ids
    tuple: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tuple)

    def __add__(self, other: "ChatText") -> "ChatText":
        return ChatText(np.concatenate([self.array, other.array]), self.tuple + other.tuple)


@dataclass(slots=True, eq=False)
class Chat:
    text: ChatText


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One request of the load."""

    chat: Chat
    prompt: ChatText
    output_tokens: int
    max_new_tokens: int

    def with_output(self, count: int) -> ChatText:
        """The prompt and its first output tokens, fewer than all."""
        return self.prompt + ChatText(np.full(count, TOKEN, dtype=np.int32), (TOKEN,) * count) if count else self.prompt


class Chats:
    """Draws the turns. The same calls give the same turns."""

    def __init__(self, load: ChatLoad, seed: int) -> None:
        self._load = load
        self._random = np.random.default_rng(seed)
        self._filler = tuple(range(load.max_tokens + 10_000))
        self._filler_array = np.array(self._filler, dtype=np.int32)
        self._num_texts = 0
        self._idle = [self._begin() for _ in range(load.num_chats)]
        for chat in self._idle:  # chats of all ages, as later
            self._grow(chat, int(self._random.uniform(0, load.max_tokens - len(chat.text))))

    def next(self) -> ChatTurn:
        load, random = self._load, self._random
        output_tokens = int(load.output.draw(random, 1)[0])
        user = int(load.user.draw(random, 1)[0])
        if not load.shares:
            length = int(random.uniform(load.system_tokens, load.max_tokens)) + user
            chat = Chat(self._own_text(length))
        else:
            chat = self._take_idle()
            if len(chat.text) + user > load.max_tokens:
                chat = self._begin()
            self._grow(chat, user)
        return ChatTurn(chat, chat.text, output_tokens, output_tokens if load.exact else load.max_new_tokens)

    def answered(self, turn: ChatTurn) -> None:
        """The chat may go on."""
        if self._load.shares:
            end = ChatText(np.array([END_TOKEN], dtype=np.int32), (END_TOKEN,))
            turn.chat.text = turn.with_output(turn.output_tokens - 1) + end
            self._idle.append(turn.chat)

    def _take_idle(self) -> Chat:
        if not self._idle:
            return self._begin()
        at = int(self._random.integers(len(self._idle)))
        self._idle[at], self._idle[-1] = self._idle[-1], self._idle[at]
        return self._idle.pop()

    def _begin(self) -> Chat:
        system = FIRST_SYSTEM_ID + int(self._random.integers(self._load.num_systems))
        return Chat(self._text(system, self._load.system_tokens))

    def _grow(self, chat: Chat, tokens: int) -> None:
        if tokens:
            chat.text += self._own_text(tokens)

    def _own_text(self, tokens: int) -> ChatText:
        self._num_texts += 1
        return self._text(FIRST_TEXT_ID + self._num_texts, tokens)

    def _text(self, first: int, tokens: int) -> ChatText:
        array = self._filler_array[:tokens].copy()
        array[0] = first
        return ChatText(array, (first, *self._filler[1:tokens]))


def steady_arrivals(rate: float, duration_s: float, seed: int) -> Floats:
    """Poisson arrivals, on average `rate` per second."""
    random = np.random.default_rng(seed)
    return np.sort(random.uniform(0, duration_s, random.poisson(rate * duration_s)))


def day_arrivals(mean_rate: float, duration_s: float, seed: int) -> Floats:
    """Arrivals of a day that lasts `duration_s`: a third of the mean rate at night, peaks of about 1.8 times the mean
    rate at 11 and at 20 o'clock."""
    random = np.random.default_rng(seed)
    hours = np.linspace(0, 24, 1441)
    shape = 0.3 + sum(np.exp(-(((hours - peak) / width) ** 2)) for peak, width in ((11, 3.0), (20, 2.2)))
    shape += 0.1 * np.cos((hours - 15) / 24 * 2 * pi)
    total = np.concatenate([[0.0], np.cumsum((shape[1:] + shape[:-1]) / 2)])
    count = random.poisson(mean_rate * duration_s)
    arrivals: Floats = np.interp(np.sort(random.uniform(0, total[-1], count)), total, hours / 24 * duration_s)
    return arrivals
