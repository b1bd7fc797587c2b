"""How the routes of /v1 write their answers: as OpenAI does, or as TGI does (`--tgi-dialect`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from text_generation_common.logs import request_id
from text_generation_router.text.tokens.events import FinishReason

OPENAI_REASONS = MappingProxyType(
    {
        FinishReason.EOS_TOKEN: "stop",
        FinishReason.STOP_SEQUENCE: "stop",
        FinishReason.LENGTH: "length",
        FinishReason.DEADLINE: "length",  # OpenAI has no word for it; as with a length, the text could go on
    }
)
TGI_REASONS = MappingProxyType({reason: reason.value for reason in FinishReason} | {FinishReason.EOS_TOKEN: "stop"})


@dataclass(frozen=True, slots=True)
class Style:
    is_tgis: bool
    reasons: Mapping[FinishReason, str]

    @property
    def keeps_stop(self) -> bool:
        """Whether a text keeps the stop string that ended it, if the request does not say so."""
        return self.is_tgis

    def identity(self, prefix: str) -> str:
        """The `id` of an answer. The client's request id, or a random one, follows the prefix."""
        return "" if self.is_tgis else f"{prefix}-{request_id.get()}"


OPENAI_STYLE = Style(False, OPENAI_REASONS)
TGI_STYLE = Style(True, TGI_REASONS)


def style_of(tgi_dialect: bool) -> Style:
    return TGI_STYLE if tgi_dialect else OPENAI_STYLE
