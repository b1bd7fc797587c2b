"""How families of models mark what they write for themselves before the answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    frames: tuple[tuple[str, str], ...] = ()  # what may stand around the answer then
    # Each has texts that a chat template contains, all of them, if its model writes this format.
    seen_in: tuple[tuple[str, ...], ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends, *(mark for frame in self.frames for mark in frame))

    def is_open_in(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with an opening marker, so that the model's text begins with reasoning."""
        return bool(self.begins) and prompt.rstrip().endswith(tuple(begin.rstrip() for begin in self.begins))


# The more particular formats come first: `reasoning_of` takes the first that a template shows.
REASONING_FORMATS = {
    row.name: row
    for row in (
        ReasoningFormat("harmony", seen_in=(("<|channel|>", "<|message|>"),)),
        ReasoningFormat("gemma4", ("<|channel>thought\n",), ("<channel|>",), seen_in=(("<|channel>", "<channel|>"),)),
        ReasoningFormat(
            "command",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
            seen_in=(("<|START_THINKING|>",),),
        ),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), seen_in=(("[THINK]",),)),
        ReasoningFormat("seed-oss", ("<seed:think>",), ("</seed:think>",), seen_in=(("seed:think",),)),
        ReasoningFormat("kimi", ("◁think▷",), ("◁/think▷",), seen_in=(("◁think▷",),)),
        ReasoningFormat(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
            seen_in=(("Here is my thought process:",), ("Here's my thought process:",)),
        ),
        ReasoningFormat(
            "granite-tags",
            ("<think>",),
            ("</think>",),
            (("<response>", "</response>"),),
            seen_in=(("<response></response>",),),
        ),
        ReasoningFormat("think", ("<think>",), ("</think>",), seen_in=(("<think>",), ("</think>",))),
    )
}


def reasoning_of(template: str) -> ReasoningFormat | None:
    """The format in which the model of a chat template writes reasoning, as far as the template shows it."""
    for row in REASONING_FORMATS.values():
        if any(all(mark in template for mark in marks) for marks in row.seen_in):
            return row
    return None
