"""What a report says of several runs together."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from primal_attention.analysis.report.figures import draw_curves, draw_explained
from primal_attention.analysis.report.html import Html, Picture, Section, figures, paragraph, table
from primal_attention.analysis.report.run import Run, settings
from primal_attention.analysis.report.sections import Subject, curve_of
from primal_attention.training.intervals import estimate


def names_of(runs: Sequence[Run]) -> list[str]:
    """Names that tell the runs apart: the model, and what else differs."""
    columns = [
        [run.recipe.task for run in runs],
        [run.recipe.protocol for run in runs],
        [f"seed {run.recipe.seed}" for run in runs],
    ]
    differing = [column for column in columns if len(set(column)) > 1]
    parts = zip([run.recipe.model for run in runs], *differing, strict=True)
    names = [", ".join(each) for each in parts]
    if len(set(names)) == len(names):
        return names
    numbered = [f"{name}, run {place}" for place, name in enumerate(names, 1)]
    return [
        long if names.count(name) > 1 else name for long, name in zip(numbered, names, strict=True)
    ]


def comparison(subjects: Sequence[Subject]) -> Iterator[Section]:
    """Tables of all runs, and their curves over each other."""
    yield Section("runs", "Results", _results(subjects))
    if seeds := _over_seeds(subjects):
        columns = ("runs", "test metric, mean ± 95 % interval (seeds)")
        yield Section("seeds", "Over seeds", table(columns, seeds, caption="The same but the seed"))
    groups = _by_task(subjects)
    for number, (task, members) in enumerate(groups.items()):
        title = "Learning curves" if len(groups) == 1 else f"Learning curves of {task}"
        yield Section(f"curves{number or ''}", title, figures(_curves(members)))
    yield Section("spectra", "Attention spectra", _spectra(subjects))
    yield Section("differences", "Settings that differ", _differences(subjects))


def _results(subjects: Sequence[Subject]) -> Html:
    columns = ("run", "task", "protocol", "test metric", "value", "the paper", "chosen by", "best")
    more = ("parameters", "steps", "time", "device")
    rows = (_result(each) for each in subjects)
    return table((*columns, *more), rows, caption="What came of each run")


def _result(subject: Subject) -> tuple[str, ...]:
    run, outcome = subject.run, subject.run.outcome
    return (
        subject.name,
        run.recipe.task,
        run.recipe.protocol,
        outcome.metric,
        f"{outcome.value:.4g}",
        "-" if subject.printed is None else f"{subject.printed.number:g}",
        f"{run.chooser}, {outcome.valid:.4g}",
        f"{run.unit} {run.best_round[run.unit]:g}",
        f"{run.num_parameters:,}",
        f"{outcome.steps:,}",
        f"{outcome.seconds:.1f} s",
        outcome.device,
    )


def _over_seeds(subjects: Sequence[Subject]) -> list[tuple[str, str]]:
    groups: dict[str, list[Subject]] = defaultdict(list)
    for each in subjects:
        values = settings(each.run.recipe) | {"seed": ""}
        groups[json.dumps(values, sort_keys=True)].append(each)
    return [
        (", ".join(each.name for each in group), str(estimate([_value(each) for each in group])))
        for group in groups.values()
        if len(group) > 1
    ]


def _value(subject: Subject) -> float:
    return subject.run.outcome.value


def _by_task(subjects: Sequence[Subject]) -> Mapping[str, list[Subject]]:
    groups: dict[str, list[Subject]] = defaultdict(list)
    for each in subjects:
        groups[each.run.recipe.task].append(each)
    return groups


def _curves(members: Sequence[Subject]) -> Iterator[tuple[Picture, str]]:
    """Runs of one task; in steps where one of them is counted in steps."""
    unit = "step" if any(each.run.unit == "step" for each in members) else "epoch"
    metric = members[0].run.outcome.metric
    columns = {
        f"valid_{metric}": f"The {metric} of the cases that choose, best rounds marked.",
        "valid_loss": "Loss of the cases that choose.",
        "train_loss": "Loss of the training cases.",
    }
    for column, caption in columns.items():
        curves = [curve_of(each.run, column, each.name, unit) for each in members]
        yield draw_curves(curves, unit, column.replace("_", " ")), caption


def _spectra(subjects: Sequence[Subject]) -> Html:
    measured = {each.name: each.looks.spectrum for each in subjects if each.looks.spectrum}
    if not measured:
        reasons = (f"{each.name}: {each.looks.reason('spectrum')}" for each in subjects)
        return paragraph(f"Left out. {'; '.join(reasons)}.")
    drawn = [
        (
            draw_explained({name: each.layers[place] for name, each in measured.items()}, title),
            f"Explained variance of the {title} of each run, on test cases.",
        )
        for place, title in ((0, "first layer"), (-1, "last layer"))
    ]
    return figures(drawn)


def _differences(subjects: Sequence[Subject]) -> Html:
    every = [settings(each.run.recipe) for each in subjects]
    names = list(dict.fromkeys(name for each in every for name in each))
    rows = [(name, *(each.get(name, "default") for each in every)) for name in names]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return paragraph("None.")
    columns = ("setting", *(each.name for each in subjects))
    return table(columns, differing, caption="Settings in which the runs differ")
