"""The pieces of an answer's text: of an event, and of a whole text."""

from collections.abc import Sequence

from text_generation_router.api.common.generation import Generation, Result
from text_generation_router.text.tokens.events import TokenEvent
from text_generation_router.text.tokens.pieces import Piece, Text


def pieces_of_event(generation: Generation, event: TokenEvent) -> Sequence[Piece]:
    """The pieces that an event adds to its generation's text. To be called once for each event, in order."""
    if generation.reader is not None:
        return generation.pieces_of(event)
    return (Text(event.text),) if event.text else ()


def pieces_of_result(result: Result) -> Sequence[Piece]:
    if result.is_divided:
        return result.pieces
    text = result.finish.generated_text
    return (Text(text),) if text else ()
