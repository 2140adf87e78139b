"""The part of a report that compares several runs."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from primal_attention.analysis.report.data import FinishedRun, settings
from primal_attention.analysis.report.figures import draw_curves, draw_explained
from primal_attention.analysis.report.html import Beside, Block, DataTable, Illustration, Section
from primal_attention.analysis.report.sections import ReportedRun, curve_of
from primal_attention.training.results import estimate


def names_of(runs: Sequence[FinishedRun]) -> list[str]:
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


def comparison(reported: Sequence[ReportedRun]) -> Iterator[Section]:
    """Tables of all runs, and their curves over each other."""
    columns = ("run", "task", "protocol", "test metric", "value", "the paper", "chosen by", "best")
    more = ("parameters", "steps", "time", "device")
    rows = [_result(each) for each in reported]
    results = DataTable((*columns, *more), rows, "What came of each run")
    yield Section("runs", "Results", [results])
    if seeds := _over_seeds(reported):
        heads = ("runs", "test metric, mean ± 95 % interval (seeds)")
        table = DataTable(heads, seeds, "The same but the seed")
        yield Section("seeds", "Over seeds", [table])
    by_task: dict[str, list[ReportedRun]] = defaultdict(list)
    for each in reported:
        by_task[each.run.recipe.task].append(each)
    for number, (task, members) in enumerate(by_task.items()):
        title = "Learning curves" if len(by_task) == 1 else f"Learning curves of {task}"
        yield Section(f"curves{number or ''}", title, [Beside(list(_curves(members)))])
    yield Section("spectra", "Attention spectra", [_spectra(reported)])
    yield Section("differences", "Settings that differ", [_differences(reported)])


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
        values = settings(each.run.recipe) | {"seed": ""}
        groups[json.dumps(values, sort_keys=True)].append(each)
    return [
        (
            ", ".join(each.name for each in group),
            str(estimate([each.run.outcome.value for each in group])),
        )
        for group in groups.values()
        if len(group) > 1
    ]


def _curves(members: Sequence[ReportedRun]) -> Iterator[Illustration]:
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
        yield Illustration(draw_curves(curves, unit, column.replace("_", " ")), caption)


def _spectra(reported: Sequence[ReportedRun]) -> Block:
    found = {each.name: each.findings.spectrum for each in reported}
    measured = {name: each for name, each in found.items() if not isinstance(each, str)}
    if not measured:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.items())
        return f"Left out. {reasons}."
    return Beside(
        [
            Illustration(
                draw_explained({n: each.layers[place] for n, each in measured.items()}, title),
                f"Explained variance of the {title} of each run, on test cases.",
            )
            for place, title in ((0, "first layer"), (-1, "last layer"))
        ]
    )


def _differences(reported: Sequence[ReportedRun]) -> Block:
    every = [settings(each.run.recipe) for each in reported]
    names = list(dict.fromkeys(name for each in every for name in each))
    rows = [(name, *(each.get(name, "default") for each in every)) for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "None."
    columns = ("setting", *(each.name for each in reported))
    return DataTable(columns, differing, "Settings in which the runs differ")
