"""Differences between the command line of a program and the declarations of its flags."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from text_generation_common.flags.declaration import REQUIRED, Flag, flags_of
from text_generation_common.flags.kinds import UsageStats
from text_generation_common.flags.requests import PREFILL_TOKENS


class Changes(TypedDict, total=False):
    """Fields of `Flag` whose values differ in one program from those in the flag's declaration."""

    type: Any
    default: object
    help: str
    short: str | None
    hidden: bool
    positional: bool
    off: bool
    refused_except: tuple[object, ...]
    no_effect: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFlags:
    changes: Mapping[str, Changes]
    has_variables: bool = True  # whether flags can also be given as environment variables
    # Whether typer refuses a value that is not among the choices; otherwise the program checks it.
    checks_choices: bool = True

    def flags_of(self, config_class: Any) -> Iterator[Flag]:
        for flag in flags_of(config_class):
            if not self.has_variables:
                flag = replace(flag, env=False)
            yield replace(flag, **self.changes.get(flag.name, {}))


LAUNCHER = ProgramFlags(
    changes={
        "graceful_termination_timeout": {"type": int},
        "stream_write_timeout": {"type": int},
        "usage_stats": {"type": UsageStats | None},
    }
)

ROUTER = ProgramFlags(
    changes={
        "waiting_served_ratio": {"default": 1.2},
        "max_batch_prefill_tokens": {"default": PREFILL_TOKENS, "help": "Most prompt tokens of one step."},
        "graceful_termination_timeout": {"default": 90.0, "short": None},
        "stream_write_timeout": {"default": 30.0},
        "prometheus_port": {"default": 9000},
        "usage_stats": {"default": "on"},
        "weights_cache_override": {"hidden": True},
        "trust_remote_code": {"hidden": True},
        "ngrok": {"hidden": True},
        "ngrok_authtoken": {"hidden": True},
        "ngrok_edge": {"hidden": True},
    },
)

SHARD = ProgramFlags(
    has_variables=False,
    checks_choices=False,
    changes={
        "model_id": {
            "default": REQUIRED,
            "positional": True,
            "help": "A model id of the Hugging Face hub, or a directory.",
        },
        "port": {"short": None, "help": "Port of this shard's router; the socket's folder is named after it."},
        "max_input_tokens": {"help": "Longest prompt; the router enforces it."},
        "json_output": {"off": True},
        "trust_remote_code": {"off": True},
        "otlp_endpoint": {"refused_except": (None, ""), "help": "Not supported: the router makes the traces."},
        "otlp_service_name": {"default": "text-generation-inference.server"},
    },
)
