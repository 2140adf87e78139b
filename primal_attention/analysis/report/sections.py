"""What a report says of one run, section by section."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from primal_attention.analysis.report.figures import (
    Curve,
    draw_confusion,
    draw_curves,
    draw_energies,
    draw_explained,
    draw_singular_values,
)
from primal_attention.analysis.report.html import (
    Html,
    Picture,
    Section,
    cards,
    details,
    figure,
    figures,
    joined,
    paragraph,
    side_by_side,
    table,
)
from primal_attention.analysis.report.looks import Looks, Predictions
from primal_attention.analysis.report.run import (
    Printed,
    Run,
    changes,
    environment,
    environment_of_report,
    settings,
)
from primal_attention.analysis.spectrum import COLUMNS, Spectrum
from primal_attention.analysis.suggestion import suggestion_from


class Subject(NamedTuple):
    """A run and all that a report knows of it."""

    name: str  # among the runs of the page
    run: Run
    looks: Looks
    printed: Printed | None


def headline(subject: Subject) -> Html:
    """The numbers to see first."""
    run, outcome = subject.run, subject.run.outcome
    best = f"{run.unit} {run.best_round[run.unit]:g}, best of {len(outcome.rounds)} rounds"
    facts = [
        (f"test {outcome.metric}", f"{outcome.value:.4g}", "with the weights of the best round")
    ]
    if subject.printed is not None:
        facts.append(("the paper", f"{subject.printed.number:g}", subject.printed.table))
    facts += [
        (f"{run.chooser} {outcome.metric}", f"{outcome.valid:.4g}", best),
        ("parameters", f"{run.num_parameters:,}", type(run.model).__name__),
        ("training", _duration(outcome.seconds), f"{outcome.steps:,} steps on {outcome.device}"),
    ]
    return joined([cards(facts), *map(paragraph, _warnings(run))])


def _warnings(run: Run) -> Iterator[str]:
    if run.recipe.valid_fraction is None:
        yield "The round was chosen on the test cases: the number is that of the best test round."
    if run.recipe.refit:
        yield "After the best round was known, the model was trained anew on all training cases."


def sections(subject: Subject, anchor: str) -> Iterator[Section]:
    """All of a run, anchors after the given one."""
    parts = (
        ("curves", "Learning curves", _curves(subject.run)),
        ("predictions", "Predictions", _predictions(subject.looks)),
        ("spectra", "Attention spectra", _spectra(subject.looks)),
        ("primal", "Primal layers", _primal(subject.looks)),
        ("parameters", "Parameters", _parameters(subject.run)),
        ("settings", "Settings", _settings(subject.run)),
        ("environment", "Environment", _environment(subject.run)),
    )
    for name, title, body in parts:
        yield Section(f"{anchor}{name}", title, body)


def curve_of(run: Run, column: str, name: str, unit: str) -> Curve:
    """A column of the rounds."""
    rounds = run.outcome.rounds
    return Curve(name, [r[unit] for r in rounds], [r[column] for r in rounds], run.outcome.best)


def _curves(run: Run) -> Html:
    metric = run.outcome.metric
    losses = [curve_of(run, f"{part}_loss", part, run.unit) for part in ("train", "valid")]
    losses[0] = losses[0]._replace(best=None)
    one = curve_of(run, f"valid_{metric}", metric, run.unit)
    drawn = [
        (
            draw_curves(losses, run.unit, "loss"),
            f"Loss of the training and the {run.chooser} cases.",
        ),
        (
            draw_curves([one], run.unit, metric),
            f"{run.chooser.title()} {metric}; the best round is marked.",
        ),
    ]
    if any(entry["objective"] for entry in run.outcome.rounds):
        caption = f"The KSVD objective ({run.recipe.objective}), of weight {run.recipe.eta:g}."
        objective = curve_of(run, "objective", "objective", run.unit)
        drawn.append((draw_curves([objective], run.unit, "objective"), caption))
    return figures(drawn)


def _predictions(looks: Looks) -> Html:
    found = looks.predictions
    if found is None:
        return paragraph(f"Left out: {looks.reason('predictions')}.")
    seen = f"{found.num_cases} of {found.of}" if found.num_cases < found.of else f"all {found.of}"
    text = (
        f"Accuracy {found.accuracy:.2f} on {seen} test cases, computed for this page in float32 "
        "on the CPU."
    )
    picture = draw_confusion(found.confusion, found.labels)
    drawn = figure(picture, "Cases of each class by what they were taken for.")
    columns = ("class", "cases", "correct", "accuracy", "most often mistaken for")
    rows = (_of_class(found, index) for index in range(len(found.labels)))
    lines = table(columns, rows, caption="Accuracy of each class")
    return joined([paragraph(text), side_by_side([drawn, lines])])


def _of_class(found: Predictions, index: int) -> tuple[str, ...]:
    row = found.confusion[index].clone()
    cases, correct = int(row.sum()), int(row[index])
    row[index] = 0
    mistaken = int(row.argmax())
    rate = f"{100 * correct / cases:.1f} %" if cases else "-"
    other = f"{found.labels[mistaken]} ({int(row[mistaken])})" if row.any() else "-"
    return found.labels[index], str(cases), str(correct), rate, other


def _spectra(looks: Looks) -> Html:
    found = looks.spectrum
    if found is None:
        return paragraph(f"Left out: {looks.reason('spectrum')}.")
    layers = {layer.name: layer for layer in found.layers}
    drawn: list[tuple[Picture, str]] = [
        (draw_explained(layers), "Cumulative explained variance; the line is at 90 %."),
        (draw_singular_values(layers), "Singular values over the first, in the mean."),
    ]
    text = (
        f"Matrices of every attention layer on {looks.num_cases} test cases: attention matrices, "
        "of Primal layers kernel matrices. Mean ± deviation over heads and cases."
    )
    columns = (*COLUMNS, "directions suggested")
    skipped = (paragraph(f"{name}: {why}") for name, why in found.skipped.items())
    lines = table(columns, _spectrum_rows(found), caption="Attention layers")
    return joined([paragraph(text), figures(drawn), lines, *skipped])


def _spectrum_rows(found: Spectrum) -> Iterator[tuple[str, ...]]:
    suggested = suggestion_from(found).num_directions
    for layer in found.layers:
        yield *layer.cells(), str(suggested[layer.name])


def _primal(looks: Looks) -> Html:
    found = looks.duality
    if found is None:
        return paragraph(f"Left out: {looks.reason('duality')}.")
    text = (
        "How far each Primal layer is from the KSVD of its kernel: the largest relative error of "
        "the KKT conditions, the objective J, and the energy that its directions explain, beside "
        "the most that so many can. A layer far from that is not wrong: no output needs the KSVD."
    )
    suggested = {} if looks.spectrum is None else suggestion_from(looks.spectrum).num_directions
    rows = (
        (
            layer.name,
            layer.weights,
            str(layer.num_directions),
            str(suggested.get(layer.name, "-")),
            *map(str, (layer.kkt, layer.objective, layer.relative_objective)),
            *map(str, (layer.explained, layer.subspaces, layer.best)),
        )
        for layer in found.layers
    )
    columns = ("layer", "weights", "directions", "suggested", "KKT residual", "J", "relative J")
    last = ("explained", "by subspaces", "best possible")
    caption = "Energy of the kernel matrix; a negative number is drawn as none."
    drawn = figures([(draw_energies(found.layers), caption)])
    return joined([paragraph(text), drawn, table((*columns, *last), rows, caption="Primal layers")])


def _parameters(run: Run) -> Html:
    rows = list(parameter_rows(run.model))
    rows.append(("all", type(run.model).__name__, f"{run.num_parameters:,}", _frozen(run.model)))
    columns = ("part", "kind", "parameters", "of these frozen")
    return table(columns, rows, caption="Parameters of each part")


def parameter_rows(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Part, kind, parameters and how many of them are frozen."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, parameter in model.named_parameters():
        count = counts[_part(name)]
        count[0] += parameter.numel()
        count[1] += 0 if parameter.requires_grad else parameter.numel()
    modules = dict(model.named_modules())
    for part, (number, frozen) in counts.items():
        kind = type(modules[part]).__name__ if part in modules else ""
        yield part or "(its own)", kind, f"{number:,}", f"{frozen:,}"


def _part(name: str) -> str:
    """What a parameter is counted for: a part of a block, else the second level of the model."""
    owner = name.split(".")[:-1]
    numbered = [place for place, each in enumerate(owner) if each.isdigit()]
    return ".".join(owner[: numbered[0] + 2 if numbered else 2])


def _frozen(model: nn.Module) -> str:
    return f"{sum(each.numel() for each in model.parameters() if not each.requires_grad):,}"


def _settings(run: Run) -> Html:
    changed = changes(run.recipe)
    columns = ("setting", "this run", "the named recipe")
    rows = ((name, *pair) for name, pair in changed.items())
    first = (
        table(columns, rows, caption="What differs from the named recipe")
        if changed
        else paragraph("All settings are those of the named recipe.")
    )
    every = table(("setting", "value"), settings(run.recipe).items(), caption="The recipe")
    return joined([first, details("All settings", every)])


def _environment(run: Run) -> Html:
    made = table(("the run", ""), environment(run).items(), caption="Where the run was made")
    written = table(("this page", ""), _page_facts(), caption="Where this page was made")
    return joined([made, written])


def _page_facts() -> Iterable[tuple[str, str]]:
    return environment_of_report().items()


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
