"""Flags of TGI's router without a feature here: refused by name, or accepted and logged as having no effect."""

import logging
from collections.abc import Mapping

from text_generation_router.errors import StartError

logger = logging.getLogger(__name__)

# Refused flags: the value that is allowed because it does not ask for the feature.
UNSUPPORTED: Mapping[str, object] = {
    "trust_remote_code": False,
    "otlp_endpoint": None,
    "ngrok": False,
    "ngrok_authtoken": None,
    "ngrok_edge": None,
    "max_image_fetch_size": 1_073_741_824,
}

# Accepted flags: the default value, and why any other value has no effect.
WITHOUT_EFFECT: Mapping[str, tuple[object, str]] = {
    "prometheus_port": (9000, "metrics are served on --port at /metrics"),
    "usage_stats": ("on", "no usage is ever sent"),
    "otlp_service_name": ("text-generation-inference.router", "it names traces, which need --otlp-endpoint"),
    "disable_grammar_support": (False, "grammars are not supported yet"),
}


def refuse_unsupported(given: Mapping[str, object]) -> None:
    """Raises StartError naming the first flag whose feature does not exist."""
    for name, neutral in UNSUPPORTED.items():
        if given[name] != neutral:
            raise StartError(f"{flag_name(name)} is not supported yet: start without it")


def mention_without_effect(given: Mapping[str, object]) -> None:
    for name, (neutral, why) in WITHOUT_EFFECT.items():
        if given[name] != neutral:
            logger.info("%s has no effect: %s", flag_name(name), why)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")
