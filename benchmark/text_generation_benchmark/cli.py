"""`text-generation-benchmark compare`: the server beside transformers and the memory's speed."""

from pathlib import Path
from typing import Annotated

import typer

START, END = "<!-- table: start -->", "<!-- table: end -->"

app = typer.Typer(
    help="Measures the server.", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)


@app.callback()
def commands() -> None:
    """Measures the server, beside a peer or a physical limit taken in the same run."""


@app.command()
def compare(
    write: Annotated[Path | None, typer.Option(help="A Markdown file whose marked table is replaced.")] = None,
) -> None:
    """Tokens per second at 1 and 16 concurrent requests, beside transformers' generate and the memory's speed."""
    from importlib.util import find_spec

    from text_generation_benchmark.compare import as_markdown
    from text_generation_benchmark.compare import compare as run

    server = find_spec("text_generation_server")
    assert server is not None and server.submodule_search_locations is not None
    table = as_markdown(*run(Path(server.submodule_search_locations[0]) / "demo_model"))
    typer.echo(table)
    if write is not None:
        write.write_text(replace_table(write.read_text(), table))


def replace_table(text: str, table: str) -> str:
    """`text` with what stands between the marks replaced. ValueError if the marks are not there."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"there is no {START} … {END} to write into")
    return f"{before}{START}\n{table}\n{END}{after}"


def main() -> None:
    app()
