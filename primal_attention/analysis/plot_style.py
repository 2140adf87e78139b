"""The look of every plot of this library: one palette, one way to make a figure and to write it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.atomic_files import replacing
from primal_attention.extras import needing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = {  # Okabe and Ito, which most colour-blind people can tell apart
    "vermilion": "#D55E00",
    "blue": "#0072B2",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
}
COLOURS = tuple(PALETTE.values())
LINE_STYLES = ("-", "--", ":", "-.")
LINES = [(colour, style) for style in LINE_STYLES for colour in COLOURS]  # all that differ


def new_figure(width: float, height: float) -> "Figure":
    """Make an empty figure; sizes in inches."""
    with needing("figures need matplotlib", "train"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: "Figure", path: Path, **options: Any) -> None:
    """Write a figure in one step, in the format of its suffix; half a file is never left."""
    with replacing(path) as written:
        figure.savefig(written, format=path.suffix[1:] or "png", dpi=160, **options)


def plot_shares(axes: Any, mean: Any, deviation: Any = None, **style: Any) -> None:
    """Draw a curve of shares over the numbers from 1 on, with a band of one deviation if given."""
    x = range(1, len(mean) + 1)
    axes.plot(x, mean, **style)
    if deviation is not None:
        low, high = (mean - deviation).clip(0, 1), (mean + deviation).clip(0, 1)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
