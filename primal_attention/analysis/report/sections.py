"""The chapters of a report: each run, and the comparison of several."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from primal_attention.analysis.duality import DUALITY_COLUMNS
from primal_attention.analysis.figures import plot_spectra
from primal_attention.analysis.report import data
from primal_attention.analysis.report.figures import Curve, address, draw_confusion, draw_curves
from primal_attention.analysis.report.page import Chapter, DataTable, Fact, Illustration, Section
from primal_attention.analysis.spectrum import SPECTRUM_COLUMNS
from primal_attention.analysis.suggestion import suggestion_from
from primal_attention.training.results import estimate


class ReportedRun(NamedTuple):
    """A run and all that a report knows of it."""

    name: str  # unique on the page
    run: data.FinishedRun
    findings: data.RunFindings
    printed: tuple[float, str] | None  # the paper's number and the name of its table


def chapter_of(reported: ReportedRun, anchor: str) -> Chapter:
    """Show one run."""
    run, findings = reported.run, reported.findings
    text = []
    if run.recipe.data.valid_fraction is None:
        text.append(
            "The round was chosen on the test cases: the number is that of the best test round."
        )
    if run.recipe.run.refit:
        text.append(
            "After the best round was known, the model was trained anew on all training cases."
        )
    sections = [
        Section("curves", "Learning curves", figures=list(_curves(run))),
        _predictions(findings),
        _spectra(findings),
        _primal(findings),
        _settings(run),
        _environment(run),
    ]
    return Chapter(anchor, reported.name, _facts(reported), text, sections)


def _facts(reported: ReportedRun) -> list[Fact]:
    """The numbers to see first."""
    run, outcome = reported.run, reported.run.outcome
    unit, metric = run.recipe.optim.unit, outcome.metric
    best = f"{unit} {outcome.rounds[outcome.best][unit]:g}, best of {len(outcome.rounds)} rounds"
    facts = [Fact(f"test {metric}", f"{outcome.value:.4g}", "with the weights of the best round")]
    if reported.printed is not None:
        number, table = reported.printed
        facts.append(Fact("the paper", f"{number:g}", table))
    count = sum(each.numel() for each in run.model.parameters())
    steps = f"{outcome.steps:,} steps on {outcome.device}"
    return [
        *facts,
        Fact(f"{run.chooser} {metric}", f"{outcome.valid:.4g}", best),
        Fact("parameters", f"{count:,}", type(run.model).__name__),
        Fact("training", _duration(outcome.seconds), steps),
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _curve(run: data.FinishedRun, column: str, name: str, unit: str) -> Curve:
    """A column of the rounds."""
    rounds = run.outcome.rounds
    return Curve(name, [r[unit] for r in rounds], [r[column] for r in rounds], run.outcome.best)


def _curves(run: data.FinishedRun) -> Iterator[Illustration]:
    metric, unit = run.outcome.metric, run.recipe.optim.unit
    losses = [_curve(run, f"{cases}_loss", cases, unit) for cases in ("train", "valid")]
    losses[0] = losses[0]._replace(best=None)
    caption = f"Loss of the training and the {run.chooser} cases."
    yield Illustration(draw_curves(losses, unit, "loss"), caption)
    one = _curve(run, f"valid_{metric}", metric, unit)
    caption = f"{run.chooser.title()} {metric}; the best round is marked."
    yield Illustration(draw_curves([one], unit, metric), caption)
    if any(entry["objective"] for entry in run.outcome.rounds):
        objective = _curve(run, "objective", "objective", unit)
        optim = run.recipe.optim
        caption = f"The KSVD objective ({optim.objective}), of weight {optim.eta:g}."
        yield Illustration(draw_curves([objective], unit, "objective"), caption)


def _predictions(findings: data.RunFindings) -> Section:
    name, title = "predictions", "Predictions"
    found = findings.predictions
    if isinstance(found, str):
        return Section(name, title, [f"Left out: {found}."])
    number, correct = int(found.confusion.sum()), int(found.confusion.diagonal().sum())
    seen = f"{number} of {found.of}" if number < found.of else f"all {found.of}"
    text = (
        f"Accuracy {100 * correct / number:.2f} on {seen} test cases, computed for this page in "
        "float32 on the CPU."
    )
    picture = draw_confusion(found.confusion, found.labels)
    drawn = Illustration(picture, "Cases of each class by predicted class.")
    columns = ("class", "cases", "correct", "accuracy", "most often mistaken for")
    rows = [_of_class(found, index) for index in range(len(found.labels))]
    return Section(name, title, [text], [drawn], [DataTable(columns, rows, "Accuracy by class")])


def _of_class(found: data.Predictions, index: int) -> tuple[str, ...]:
    row = found.confusion[index].clone()
    cases, correct = int(row.sum()), int(row[index])
    row[index] = 0
    mistaken = int(row.argmax())
    rate = f"{100 * correct / cases:.1f} %" if cases else "-"
    other = f"{found.labels[mistaken]} ({int(row[mistaken])})" if row.any() else "-"
    return found.labels[index], str(cases), str(correct), rate, other


def _spectra(findings: data.RunFindings) -> Section:
    name, title = "spectra", "Attention spectra"
    found = findings.spectrum
    if isinstance(found, str):
        return Section(name, title, [f"Left out: {found}."])
    text = (
        f"Matrices of every attention layer on {findings.num_cases} test cases: attention "
        "matrices, of Primal layers kernel matrices. Mean ± deviation over heads and cases."
    )
    skipped = [f"{layer}: {why}" for layer, why in found.skipped.items()]
    drawn = Illustration(address(plot_spectra({found.model: found})), "Explained variance.")
    suggested = suggestion_from(found).num_directions
    rows = [(*layer.cells(), str(suggested[layer.name])) for layer in found.layers]
    table = DataTable((*SPECTRUM_COLUMNS, "directions suggested"), rows, "Attention layers")
    return Section(name, title, [text, *skipped], [drawn], [table])


def _primal(findings: data.RunFindings) -> Section:
    name, title = "primal", "Primal layers"
    found = findings.duality
    if isinstance(found, str):
        return Section(name, title, [f"Left out: {found}."])
    text = (
        "How far each Primal layer is from the KSVD of its kernel: the largest relative error of "
        "the KKT conditions, the objective J, and the energy that its directions explain, beside "
        "the most that so many can. A layer far from that is not wrong: no output needs the KSVD."
    )
    table = DataTable(DUALITY_COLUMNS, [each.cells() for each in found.layers], title)
    return Section(name, title, [text], tables=[table])


def _settings(run: data.FinishedRun) -> Section:
    changed = data.differences([run.recipe, data.named_recipe(run.recipe)])
    columns = ("setting", "this run", "the named recipe")
    tables = [DataTable(columns, changed, "What differs from the named recipe")] if changed else []
    every = data.settings(run.recipe).items()
    tables.append(DataTable(("setting", "value"), every, "All settings", folded=True))
    text = [] if changed else ["All settings are those of the named recipe."]
    return Section("settings", "Settings", text, tables=tables)


def _environment(run: data.FinishedRun) -> Section:
    table = DataTable(("", "the run", "this page"), data.environments(run), "Where they were made")
    return Section("environment", "Environment", tables=[table])


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


def comparison(reported: Sequence[ReportedRun]) -> Chapter:
    """Show tables of all runs, and their curves over each other."""
    sections = [Section("runs", "Results", tables=[_results(reported)])]
    if seeds := _over_seeds(reported):
        columns = ("runs", "test metric, mean ± 95 % interval (seeds)")
        table = DataTable(columns, seeds, "The same but the seed")
        sections.append(Section("seeds", "Over seeds", tables=[table]))
    by_task: dict[str, list[ReportedRun]] = defaultdict(list)
    for each in reported:
        by_task[each.run.recipe.task].append(each)
    for number, (task, members) in enumerate(by_task.items()):
        title = "Learning curves" if len(by_task) == 1 else f"Learning curves of {task}"
        drawn = list(_compared_curves(members))
        sections.append(Section(f"curves{number or ''}", title, figures=drawn))
    sections += [_compared_spectra(reported), _compared_settings(reported)]
    text = ["First all runs together, then each by itself."]
    return Chapter("comparison", "Comparison", [], text, sections)


def _results(reported: Sequence[ReportedRun]) -> DataTable:
    """The facts of all runs; a dash where one lacks them."""
    facts = [{fact.name: fact.number for fact in _facts(each)} for each in reported]
    names = list(dict.fromkeys(name for each in facts for name in each))
    rows = [
        (
            each.name,
            each.run.recipe.task,
            each.run.recipe.run.protocol,
            *(own.get(name, "-") for name in names),
        )
        for each, own in zip(reported, facts, strict=True)
    ]
    return DataTable(("run", "task", "protocol", *names), rows, "Results of each run")


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


def _compared_curves(members: Sequence[ReportedRun]) -> Iterator[Illustration]:
    """Draw runs of one task; in steps where one of them is counted in steps."""
    unit = "step" if any(each.run.recipe.optim.unit == "step" for each in members) else "epoch"
    metric = members[0].run.outcome.metric
    columns = {
        f"valid_{metric}": f"The {metric} of the cases that choose, best rounds marked.",
        "valid_loss": "Loss of the cases that choose.",
        "train_loss": "Loss of the training cases.",
    }
    for column, caption in columns.items():
        curves = [_curve(each.run, column, each.name, unit) for each in members]
        yield Illustration(draw_curves(curves, unit, column.replace("_", " ")), caption)


def _compared_spectra(reported: Sequence[ReportedRun]) -> Section:
    name, title = "spectra", "Attention spectra"
    found = {each.name: each.findings.spectrum for each in reported}
    measured = {name: each for name, each in found.items() if not isinstance(each, str)}
    missing = [f"{name}: {each}" for name, each in found.items() if isinstance(each, str)]
    if not measured:
        return Section(name, title, missing)
    drawn = Illustration(address(plot_spectra(measured)), "Explained variance, on test cases.")
    return Section(name, title, missing, [drawn])


def _compared_settings(reported: Sequence[ReportedRun]) -> Section:
    rows = data.differences(each.run.recipe for each in reported)
    columns = ("setting", *(each.name for each in reported))
    table = DataTable(columns, rows, "Settings in which the runs differ")
    return Section("differences", "Settings that differ", tables=[table])
