"""Why a part of a reader stops. None of them leaves the reader."""


class NotACallError(Exception):
    """What has been read since `Source.hold` is not a call, or not the rest of one: it is text."""


class TextEndedError(NotACallError):
    """The text ends within a call."""


class BrokenCallError(NotACallError):
    """The arguments of a call that has begun are not JSON. They have been given as the model wrote them."""


class TooMuchError(Exception):
    """The answer has more calls, or longer arguments, than a reader gives. `rest`: text that was not given."""

    def __init__(self, rest: str = "") -> None:
        super().__init__(rest)
        self.rest = rest
