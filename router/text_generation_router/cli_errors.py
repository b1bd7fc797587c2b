"""How the router's and the engine's commands end with an error of a start: one line on stderr."""

import sys
from typing import NoReturn

from text_generation_common import faults
from text_generation_router.errors import StartError


def set_up_faults(text: str, testing: bool) -> None:
    try:
        faults.setup_command(text, testing)
    except ValueError as error:
        raise StartError(str(error)) from None


def fail(reason: str) -> NoReturn:
    print(f"Error: {reason}", file=sys.stderr)
    sys.exit(1)
