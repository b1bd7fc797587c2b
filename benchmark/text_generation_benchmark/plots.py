"""The style of all plots: sheets of plots, lines over loads, labels."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# Inches of one plot, dots of an inch, and sizes of letters.
WIDTH, HEIGHT, DPI, TITLE, SMALL = 6.0, 4.0, 120, 10, 8

Line = tuple[str, Sequence[float], Sequence[float]]  # name, places, values


def check_png(path: Path | None) -> None:
    """ValueError if a picture is wanted, and cannot be drawn or written."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: install tgi-py[plots]")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--png {path}: there is no folder {path.absolute().parent}")


def sheet(rows: int, columns: int) -> "tuple[Drawing, list[Axes]]":
    """A picture of several plots."""
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
    return drawing, list(drawing.subplots(rows, columns, squeeze=False).flat)


def label(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=TITLE)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=SMALL)


def save(drawing: "Drawing", path: Path) -> None:
    drawing.savefig(path, dpi=DPI)


def against_load(axes: "Axes", title: str, x: str, y: str, lines: Sequence[Line]) -> None:
    """Lines over loads, which double from one to the next."""
    for name, places, values in lines:
        axes.plot(places, values, marker="o", linewidth=1, label=name)
    if lines:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom=0)
    label(axes, title, x, y)
