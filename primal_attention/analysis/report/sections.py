"""The sections of a report about one run, and of the comparison of several."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from primal_attention.analysis.report import data, figures, html
from primal_attention.analysis.spectrum import COLUMNS
from primal_attention.analysis.suggestion import suggestion_from
from primal_attention.training.results import estimate


class ReportedRun(NamedTuple):
    """A run and all that a report knows of it."""

    name: str  # unique on the page
    run: data.FinishedRun
    findings: data.RunFindings
    printed: tuple[float, str] | None  # the paper's number and the name of its table


def headline(reported: ReportedRun) -> list[html.Block]:
    """Return the numbers to see first."""
    run, outcome = reported.run, reported.run.outcome
    best = f"{run.unit} {run.best_round[run.unit]:g}, best of {len(outcome.rounds)} rounds"
    facts = [
        (f"test {outcome.metric}", f"{outcome.value:.4g}", "with the weights of the best round")
    ]
    if reported.printed is not None:
        number, table = reported.printed
        facts.append(("the paper", f"{number:g}", table))
    facts += [
        (f"{run.chooser} {outcome.metric}", f"{outcome.valid:.4g}", best),
        ("parameters", f"{run.num_parameters:,}", type(run.model).__name__),
        ("training", _duration(outcome.seconds), f"{outcome.steps:,} steps on {outcome.device}"),
    ]
    blocks: list[html.Block] = [html.Cards(facts)]
    if run.recipe.data.valid_fraction is None:
        blocks.append(
            "The round was chosen on the test cases: the number is that of the best test round."
        )
    if run.recipe.run.refit:
        blocks.append(
            "After the best round was known, the model was trained anew on all training cases."
        )
    return blocks


def sections(reported: ReportedRun, anchor: str) -> Iterator[html.Section]:
    """Yield all sections of a run; their anchors begin with the given one."""
    run, findings = reported.run, reported.findings
    for name, title, blocks in (
        ("curves", "Learning curves", _curves(run)),
        ("predictions", "Predictions", _predictions(findings)),
        ("spectra", "Attention spectra", _spectra(findings)),
        ("primal", "Primal layers", _primal(findings)),
        ("parameters", "Parameters", _parameters(run.model)),
        ("settings", "Settings", _settings(run)),
        ("environment", "Environment", _environment(run)),
    ):
        yield html.Section(f"{anchor}{name}", title, blocks)


def curve_of(run: data.FinishedRun, column: str, name: str, unit: str) -> figures.Curve:
    """Make a curve of a column of the rounds."""
    rounds = run.outcome.rounds
    return figures.Curve(
        name, [r[unit] for r in rounds], [r[column] for r in rounds], run.outcome.best
    )


def _curves(run: data.FinishedRun) -> list[html.Block]:
    metric, unit = run.outcome.metric, run.unit
    losses = [curve_of(run, f"{part}_loss", part, unit) for part in ("train", "valid")]
    losses[0] = losses[0]._replace(best=None)
    one = curve_of(run, f"valid_{metric}", metric, unit)
    drawn: list[html.Block] = [
        html.Illustration(
            figures.draw_curves(losses, unit, "loss"),
            f"Loss of the training and the {run.chooser} cases.",
        ),
        html.Illustration(
            figures.draw_curves([one], unit, metric),
            f"{run.chooser.title()} {metric}; the best round is marked.",
        ),
    ]
    if any(entry["objective"] for entry in run.outcome.rounds):
        objective = curve_of(run, "objective", "objective", unit)
        optim = run.recipe.optim
        caption = f"The KSVD objective ({optim.objective}), of weight {optim.eta:g}."
        drawn.append(
            html.Illustration(figures.draw_curves([objective], unit, "objective"), caption)
        )
    return [html.Beside(drawn)]


def _predictions(findings: data.RunFindings) -> list[html.Block]:
    found = findings.predictions
    if isinstance(found, str):
        return [f"Left out: {found}."]
    seen = f"{found.num_cases} of {found.of}" if found.num_cases < found.of else f"all {found.of}"
    text = (
        f"Accuracy {found.accuracy:.2f} on {seen} test cases, computed for this page in float32 "
        "on the CPU."
    )
    picture = figures.draw_confusion(found.confusion, found.labels)
    drawn = html.Illustration(picture, "Cases of each class by what they were taken for.")
    columns = ("class", "cases", "correct", "accuracy", "most often mistaken for")
    rows = [_of_class(found, index) for index in range(len(found.labels))]
    return [text, html.Beside([drawn, html.DataTable(columns, rows, "Accuracy of each class")])]


def _of_class(found: data.Predictions, index: int) -> tuple[str, ...]:
    row = found.confusion[index].clone()
    cases, correct = int(row.sum()), int(row[index])
    row[index] = 0
    mistaken = int(row.argmax())
    rate = f"{100 * correct / cases:.1f} %" if cases else "-"
    other = f"{found.labels[mistaken]} ({int(row[mistaken])})" if row.any() else "-"
    return found.labels[index], str(cases), str(correct), rate, other


def _spectra(findings: data.RunFindings) -> list[html.Block]:
    found = findings.spectrum
    if isinstance(found, str):
        return [f"Left out: {found}."]
    layers = {layer.name: layer for layer in found.layers}
    drawn = (
        html.Illustration(
            figures.draw_explained(layers), "Cumulative explained variance; the line is at 90 %."
        ),
        html.Illustration(
            figures.draw_singular_values(layers), "Singular values over the first, in the mean."
        ),
    )
    text = (
        f"Matrices of every attention layer on {findings.num_cases} test cases: attention "
        "matrices, of Primal layers kernel matrices. Mean ± deviation over heads and cases."
    )
    suggested = suggestion_from(found).num_directions
    rows = [(*layer.cells(), str(suggested[layer.name])) for layer in found.layers]
    table = html.DataTable((*COLUMNS, "directions suggested"), rows, "Attention layers")
    return [
        text,
        html.Beside(drawn),
        table,
        *(f"{name}: {why}" for name, why in found.skipped.items()),
    ]


def _primal(findings: data.RunFindings) -> list[html.Block]:
    found, measured = findings.duality, findings.spectrum
    if isinstance(found, str):
        return [f"Left out: {found}."]
    text = (
        "How far each Primal layer is from the KSVD of its kernel: the largest relative error of "
        "the KKT conditions, the objective J, and the energy that its directions explain, beside "
        "the most that so many can. A layer far from that is not wrong: no output needs the KSVD."
    )
    suggested = {} if isinstance(measured, str) else suggestion_from(measured).num_directions
    rows = []
    for layer in found.layers:
        name, weights, directions, *numbers = layer.cells()
        rows.append((name, weights, directions, str(suggested.get(name, "-")), *numbers))
    columns = ("layer", "weights", "directions", "suggested", "KKT residual", "J", "relative J")
    last = ("explained", "by subspaces", "best possible")
    caption = "Energy of the kernel matrix; a negative number is drawn as none."
    drawn = html.Beside([html.Illustration(figures.draw_energies(found.layers), caption)])
    return [text, drawn, html.DataTable((*columns, *last), rows, "Primal layers")]


def _parameters(model: nn.Module) -> list[html.Block]:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, parameter in model.named_parameters():
        count = counts[_part(name)]
        count[0] += parameter.numel()
        count[1] += 0 if parameter.requires_grad else parameter.numel()
    modules = dict(model.named_modules())
    rows = []
    for part, (number, frozen) in counts.items():
        kind = type(modules[part]).__name__ if part in modules else ""
        rows.append((part or "(its own)", kind, f"{number:,}", f"{frozen:,}"))
    number, frozen = (sum(each[place] for each in counts.values()) for place in (0, 1))
    rows.append(("all", type(model).__name__, f"{number:,}", f"{frozen:,}"))
    columns = ("part", "kind", "parameters", "of these frozen")
    return [html.DataTable(columns, rows, "Parameters of each part")]


def _part(name: str) -> str:
    """The part that a parameter belongs to: of a block, else the second level of the model."""
    owner = name.split(".")[:-1]
    numbered = [place for place, each in enumerate(owner) if each.isdigit()]
    return ".".join(owner[: numbered[0] + 2 if numbered else 2])


def _settings(run: data.FinishedRun) -> list[html.Block]:
    changed = data.changes(run.recipe)
    first: html.Block = "All settings are those of the named recipe."
    if changed:
        columns = ("setting", "this run", "the named recipe")
        first = html.DataTable(columns, changed, "What differs from the named recipe")
    every = html.DataTable(("setting", "value"), data.settings(run.recipe).items(), "The recipe")
    return [first, html.Details("All settings", [every])]


def _environment(run: data.FinishedRun) -> list[html.Block]:
    made, page = data.environment(run).items(), data.environment_of_report().items()
    return [
        html.DataTable(("the run", ""), made, "Where the run was made"),
        html.DataTable(("this page", ""), page, "Where this page was made"),
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def names_of(runs: Sequence[data.FinishedRun]) -> list[str]:
    """Names that tell the runs apart: the model, and what else differs."""
    columns = [
        [run.recipe.task for run in runs],
        [run.recipe.run.protocol for run in runs],
        [f"seed {run.recipe.run.seed}" for run in runs],
    ]
    differing = [column for column in columns if len(set(column)) > 1]
    parts = zip([run.recipe.model.name for run in runs], *differing, strict=True)
    names = [", ".join(each) for each in parts]
    return [
        f"{name}, run {place}" if names.count(name) > 1 else name
        for place, name in enumerate(names, 1)
    ]


def comparison(reported: Sequence[ReportedRun]) -> Iterator[html.Section]:
    """Tables of all runs, and their curves over each other."""
    columns = ("run", "task", "protocol", "test metric", "value", "the paper", "chosen by", "best")
    more = ("parameters", "steps", "time", "device")
    rows = [_result(each) for each in reported]
    results = html.DataTable((*columns, *more), rows, "What came of each run")
    yield html.Section("runs", "Results", [results])
    if seeds := _over_seeds(reported):
        heads = ("runs", "test metric, mean ± 95 % interval (seeds)")
        table = html.DataTable(heads, seeds, "The same but the seed")
        yield html.Section("seeds", "Over seeds", [table])
    by_task: dict[str, list[ReportedRun]] = defaultdict(list)
    for each in reported:
        by_task[each.run.recipe.task].append(each)
    for number, (task, members) in enumerate(by_task.items()):
        title = "Learning curves" if len(by_task) == 1 else f"Learning curves of {task}"
        yield html.Section(
            f"curves{number or ''}", title, [html.Beside(list(_compared_curves(members)))]
        )
    yield html.Section("spectra", "Attention spectra", [_compared_spectra(reported)])
    yield html.Section("differences", "Settings that differ", [_differences(reported)])


def _result(reported: ReportedRun) -> tuple[str, ...]:
    run, outcome = reported.run, reported.run.outcome
    return (
        reported.name,
        run.recipe.task,
        run.recipe.run.protocol,
        outcome.metric,
        f"{outcome.value:.4g}",
        "-" if reported.printed is None else f"{reported.printed[0]:g}",
        f"{run.chooser}, {outcome.valid:.4g}",
        f"{run.unit} {run.best_round[run.unit]:g}",
        f"{run.num_parameters:,}",
        f"{outcome.steps:,}",
        f"{outcome.seconds:.1f} s",
        outcome.device,
    )


def _over_seeds(reported: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    groups: dict[str, list[ReportedRun]] = defaultdict(list)
    for each in reported:
        values = data.settings(each.run.recipe) | {"seed": ""}
        groups[json.dumps(values, sort_keys=True)].append(each)
    return [
        (
            ", ".join(each.name for each in group),
            str(estimate([each.run.outcome.value for each in group])),
        )
        for group in groups.values()
        if len(group) > 1
    ]


def _compared_curves(members: Sequence[ReportedRun]) -> Iterator[html.Illustration]:
    """Draw runs of one task; in steps where one of them is counted in steps."""
    unit = "step" if any(each.run.unit == "step" for each in members) else "epoch"
    metric = members[0].run.outcome.metric
    columns = {
        f"valid_{metric}": f"The {metric} of the cases that choose, best rounds marked.",
        "valid_loss": "Loss of the cases that choose.",
        "train_loss": "Loss of the training cases.",
    }
    for column, caption in columns.items():
        curves = [curve_of(each.run, column, each.name, unit) for each in members]
        yield html.Illustration(
            figures.draw_curves(curves, unit, column.replace("_", " ")), caption
        )


def _compared_spectra(reported: Sequence[ReportedRun]) -> html.Block:
    found = {each.name: each.findings.spectrum for each in reported}
    measured = {name: each for name, each in found.items() if not isinstance(each, str)}
    if not measured:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.items())
        return f"Left out. {reasons}."
    return html.Beside(
        [
            html.Illustration(
                figures.draw_explained(
                    {n: each.layers[place] for n, each in measured.items()}, title
                ),
                f"Explained variance of the {title} of each run, on test cases.",
            )
            for place, title in ((0, "first layer"), (-1, "last layer"))
        ]
    )


def _differences(reported: Sequence[ReportedRun]) -> html.Block:
    every = [data.settings(each.run.recipe) for each in reported]
    names = list(dict.fromkeys(name for each in every for name in each))
    rows = [(name, *(each.get(name, "default") for each in every)) for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "None."
    columns = ("setting", *(each.name for each in reported))
    return html.DataTable(columns, differing, "Settings in which the runs differ")
