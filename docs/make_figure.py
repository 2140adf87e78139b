"""Draw the figure of README.md from the rows of one H200.

python docs/make_figure.py
"""

from make_tables import LAYERS, LENGTHS, ROOT, layers

from primal_attention.analysis.plot_style import PALETTE, new_figure, save_figure

SHOWN = {
    ("softmax", "", "False"): "vermilion",
    ("primal", "dual", "True"): "green",
    ("primal", "sampled", "False"): "blue",
    ("projections", "", "False"): None,
}


def main() -> None:
    rows, figure = layers(), new_figure(6.5, 3.2)
    axes = figure.subplots()
    for layer, colour in SHOWN.items():
        times = [float(rows[(*layer, n)]["gpu_ms"]) for n in LENGTHS]
        style = {"color": PALETTE[colour]} if colour else {"color": "black", "linestyle": ":"}
        axes.plot([int(n) for n in LENGTHS], times, marker=".", label=LAYERS[layer], **style)
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_xticks([int(n) for n in LENGTHS], [f"{int(n):,}" for n in LENGTHS])
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])
    axes.set_xlabel("tokens of a sequence, 65,536 tokens in all")
    axes.set_ylabel("ms, forward and backward")
    axes.set_title("One layer, H200, bfloat16")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, ROOT / "docs/speed.png")


if __name__ == "__main__":
    main()
