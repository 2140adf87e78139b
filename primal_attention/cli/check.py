"""`primal check`: hold attention modules to the contract."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from primal_attention.attention import ATTENTIONS, build_attention
from primal_attention.attention.primal.statistics import KSVDLayer
from primal_attention.cli.arguments import check_name, naming
from primal_attention.objectives import ksvd_loss
from primal_attention.testing import ContractError, Report, Status, check_attention
from primal_attention.testing.adapters import adapt
from primal_attention.training.recipe import nearest

_DIM, _HEADS = 32, 4
_DIM_NAMES = ("dim", "embed_dim", "d_model", "hidden_size")
_HEADS_NAMES = ("num_heads", "heads", "n_heads", "nhead", "num_attention_heads")
_SIGNS = {
    Status.PASSED: "[green]+[/]",
    Status.NOT_APPLICABLE: "[dim]-[/]",
    Status.EXEMPT: "[yellow]e[/]",
    Status.FAILED: "[bold red]F[/]",
}


def check(
    name: Annotated[
        str | None,
        typer.Argument(help="A name of the registry, or package.module:factory; default: all."),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(help="Only the causal or the other form; default: all that there are."),
    ] = None,
    dim: Annotated[int | None, typer.Option(help=f"Model dimension; default: {_DIM}.")] = None,
    heads: Annotated[int, typer.Option(help="Number of heads.")] = _HEADS,
    adapter: Annotated[
        str | None,
        typer.Option(help="How the module is called: mha, hf, hf-additive or lucidrains."),
    ] = None,
) -> None:
    """Hold attention modules to the contract; exit with 1 where one breaks it."""
    with naming():  # what cannot be found or built; not a broken contract
        checks = list(_checks(name, causal, dim, heads, adapter))
        shown = Console(stderr=True)
        reports = [each() for each in track(checks, "checking", transient=True, console=shown)]
    console = Console()
    if name is None:
        _print_table(console, reports)
    else:
        for report in reports:
            console.print(f"{report}\n", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


def _checks(
    name: str | None, causal: bool | None, dim: int | None, heads: int, adapter: str | None
) -> Iterator[Callable[[], Report]]:
    if name is not None and ":" in name:
        yield _of_foreign(name, bool(causal), dim, heads, adapter)
        return
    if name is not None:
        check_name("attention", name, ATTENTIONS)
    for each in ATTENTIONS if name is None else [name]:
        forms = list(_of_registered(each, causal, dim or _DIM, heads))
        if not forms and name is not None:
            raise ValueError(f"{name} has no causal form")
        yield from forms


def _of_registered(
    name: str, causal: bool | None, dim: int, heads: int
) -> Iterator[Callable[[], Report]]:
    """Yield checks of a registered mechanism: of its default form and of the causal ones."""
    objective = ksvd_loss if issubclass(ATTENTIONS[name], KSVDLayer) else None
    card = getattr(ATTENTIONS[name], "mechanism", None)
    forms: list[dict[str, Any]] = [] if causal else [{}]
    if causal is not False and card is not None and card.causal:
        forms += [{"causal": True, **options} for options in card.causal_forms]
    for options in forms:
        is_causal = "causal" in options
        words = ["causal" if value is True else value for value in options.values()]
        factory = partial(build_attention, name, dim, heads, **options)
        label = " ".join([name, *words])
        yield partial(_report, label, factory, causal=is_causal, dim=dim, objective=objective)


def _of_foreign(
    path: str, causal: bool, dim: int | None, heads: int, adapter: str | None
) -> Callable[[], Report]:
    """Check anyone's module, class or function, called with the arguments that it has names for."""
    found = _imported(path)
    if isinstance(found, nn.Module):
        adapted = adapt(found, adapter, causal=causal)
        return partial(_report, path, adapted, causal=causal, dim=dim)
    if not callable(found):
        raise ValueError(f"{path} is a {type(found).__name__}, neither a module nor builds one")
    names = inspect.signature(found).parameters
    if dim is None and not names.keys().isdisjoint(_DIM_NAMES):
        dim = _DIM
    known = dict.fromkeys(_DIM_NAMES, dim) | dict.fromkeys(_HEADS_NAMES, heads)
    known |= {"causal": causal, "batch_first": True}
    given = {each: value for each, value in known.items() if each in names}

    def build() -> nn.Module:
        try:
            module = found(**given)
        except TypeError as error:
            hint = "give a function without arguments that builds it"
            raise ValueError(f"{path} cannot be called with {given}: {error}; {hint}") from error
        return adapt(module, adapter, causal=causal)

    return partial(_report, path, build, causal=causal, dim=dim)


def _report(label: str, module: nn.Module | Callable[[], nn.Module], **options: Any) -> Report:
    try:
        report = check_attention(module, **options)
    except ContractError as error:
        report = error.report
    return replace(report, subject=label)


def _imported(path: str) -> Any:
    """Import the object of a path package.module:name, also from the working directory."""
    module_name, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{module_name!r} cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"{module_name} has no {name!r}; {nearest(name, dir(module))}")
    return getattr(module, name)


def _print_table(console: Any, reports: Sequence[Report]) -> None:
    """Print one row a module, one column a clause; then the clauses and what is not kept."""
    clauses = [result.name for result in reports[0].results]
    table = Table(title="Attention contract", box=None, padding=(0, 1, 0, 0))
    table.add_column("attention", no_wrap=True)
    for number in range(1, len(clauses) + 1):
        table.add_column(str(number), justify="right", no_wrap=True)
    for report in reports:
        table.add_row(report.subject, *(_SIGNS[result.status] for result in report.results))
    console.print(table)
    console.print("\n+ passed  - not applicable  e exempt  F failed\n", highlight=False)
    console.print(Columns([f"{number:2} {name}" for number, name in enumerate(clauses, 1)]))
    for status in (Status.EXEMPT, Status.FAILED):
        for report in reports:
            for result in report.results:
                if result.status is status:
                    line = f"{status}: {report.subject}: {result.name}: {result.detail}"
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
