"""Makes a typer command from the fields of a frozen dataclass, so that each flag is declared once, in `config.py`.

The only module here that imports typer: the `cli.py` of a command imports it, and no other module does.
"""

import inspect
from dataclasses import Field, fields
from typing import Any

import typer

from text_generation_common.flags import env_name, flag_name, off_flag_name


def signature(config_class: Any) -> inspect.Signature:
    """The signature from which typer builds the command. The command's keyword arguments are the dataclass's fields."""
    return inspect.Signature([_parameter(item) for item in fields(config_class)])


def _parameter(item: "Field[Any]") -> inspect.Parameter:
    about = item.metadata
    name = flag_name(item.name)
    if item.default is True:
        name += "/" + off_flag_name(item.name)
    names = [name] + ([about["short"]] if about["short"] else [])
    option = typer.Option(
        item.default,
        *names,
        envvar=env_name(item.name) if about["env"] else None,
        help=about["help"],
        hidden=about["hidden"],
        min=about["min"],
        max=about["max"],
    )
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=item.type)
