"""How families of models mark what they write for themselves before the answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    begin: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    def is_open_in(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the opening marker, so that the model's text begins with reasoning."""
        return prompt.rstrip().endswith(self.begin)


REASONING_FORMATS = {
    row.name: row
    for row in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    )
}
