"""Streams of all kinds at a deployment, while something is done to it."""

import asyncio
from collections.abc import Callable, Sequence

import mixed
from cluster import ARGUMENTS, ENVIRONMENT
from mixed import MixedAnswer, MixedAsk, MixedClients
from server_process import ServerProcess

# Seconds from the start of the streams to what is done.
SETTLED_S = 2.0


# Requests that are asked again at a time: the server refuses those beyond its permits.
AT_ONCE = 64


def undisturbed(num_streams: int, tokens: tuple[int, int]) -> tuple[list[MixedAsk], list[MixedAnswer]]:
    """The asks, and their answers from one process on one machine."""
    asked = mixed.mixed_asks(num_streams, tokens)
    with ServerProcess(*ARGUMENTS, environ=ENVIRONMENT) as server:
        answers = mixed.all_answers(server.url, asked)
    broken = [answer.error for answer in answers if answer.error]
    if broken:
        raise RuntimeError(f"{len(broken)} streams fail without any fault: {broken[0]}")
    return asked, answers


def answers_meanwhile(url: str, asked: Sequence[MixedAsk], work: Callable[[], None]) -> list[MixedAnswer]:
    """Keeps as many streams running as there are asks, until `work` has returned."""

    async def run() -> list[MixedAnswer]:
        clients = MixedClients(asked, len(asked))
        async with asyncio.TaskGroup() as tasks:
            # Each request has a connection of its own, so that its port tells which front it was with.
            tasks.create_task(clients.run(url, {"connection": "close"}))
            await asyncio.sleep(SETTLED_S)
            try:
                await asyncio.to_thread(work)
            finally:
                clients.finish()
        return clients.answers

    return asyncio.run(run())


def ask_again(url: str, asked: Sequence[MixedAsk], answers: Sequence[MixedAnswer]) -> list[str]:
    """Asks for each text of best_of alone, with the seed that was drawn for it. Returns the kinds that differ."""
    again = [
        pair
        for answer in answers
        if asked[answer.ask].kind == "best_of" and not answer.error
        for pair in mixed.asks_for_each_text(asked[answer.ask], answer)
    ]
    found = []
    for first in range(0, len(again), AT_ONCE):
        found += mixed.all_answers(url, [ask for ask, _ in again[first : first + AT_ONCE]])
    outcomes = zip(found, again, strict=True)
    return [f"best_of {answer.error}".strip() for answer, (_, text) in outcomes if answer.outcome != (text,)]
