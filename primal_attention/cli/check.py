"""`primal check`: hold attention modules to the contract."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer
from rich.columns import Columns
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from primal_attention.attention import ATTENTIONS, build_attention
from primal_attention.attention.primal.statistics import KSVDLayer
from primal_attention.cli.arguments import naming
from primal_attention.objectives import ksvd_loss
from primal_attention.testing import ContractError, Report, Status, check_attention
from primal_attention.testing.adapters import adapt

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
        candidates = list(_candidates(name, causal, dim, heads, adapter))
        reports = list(_reports(candidates))
    console = Console()
    if name is None:
        _print_table(console, reports)
    else:
        for report in reports:
            console.print(f"{report}\n", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if all(report.passed for report in reports) else 1)


class Candidate(NamedTuple):
    """A module to be checked."""

    label: str
    module: nn.Module | Callable[[], nn.Module]
    causal: bool
    dim: int | None
    objective: Callable[[nn.Module], Tensor] | None = None


def _candidates(
    name: str | None, causal: bool | None, dim: int | None, heads: int, adapter: str | None
) -> Iterator[Candidate]:
    if name is not None and ":" in name:
        yield _foreign(name, bool(causal), dim, heads, adapter)
        return
    if name is not None and name not in ATTENTIONS:
        near = get_close_matches(name, ATTENTIONS, cutoff=0.4) or ATTENTIONS
        raise ValueError(f"no attention is called {name!r}; the nearest names: {', '.join(near)}")
    for each in ATTENTIONS if name is None else [name]:
        forms = list(_forms(each, causal, dim or _DIM, heads))
        if not forms and name is not None:
            raise ValueError(f"{name} has no causal form")
        yield from forms


def _forms(name: str, causal: bool | None, dim: int, heads: int) -> Iterator[Candidate]:
    """Yield the forms of a registered mechanism: the default one and the causal ones."""
    objective = ksvd_loss if issubclass(ATTENTIONS[name], KSVDLayer) else None
    if not causal:
        factory = partial(build_attention, name, dim, heads)
        yield Candidate(name, factory, False, dim, objective)
    card = getattr(ATTENTIONS[name], "mechanism", None)
    if causal is False or card is None or not card.causal:
        return
    for options in card.causal_forms:
        label = " ".join([name, "causal", *options.values()])
        factory = partial(build_attention, name, dim, heads, causal=True, **options)
        yield Candidate(label, factory, True, dim, objective)


def _foreign(
    path: str, causal: bool, dim: int | None, heads: int, adapter: str | None
) -> Candidate:
    """Anyone's module, class or function, called with the arguments that it has names for."""
    found = _imported(path)
    if isinstance(found, nn.Module):
        return Candidate(path, adapt(found, adapter, causal=causal), causal, dim)
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

    return Candidate(path, build, causal, dim)


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
        near = get_close_matches(name, dir(module)) or ["none is near"]
        raise ValueError(f"{module_name} has no {name!r}; the nearest names: {', '.join(near)}")
    return getattr(module, name)


def _reports(candidates: Sequence[Candidate]) -> Iterator[Report]:
    progress = track(candidates, "checking", transient=True, console=Console(stderr=True))
    for label, module, causal, dim, objective in progress:
        try:
            report = check_attention(module, causal=causal, dim=dim, objective=objective)
        except ContractError as error:
            report = error.report
        yield replace(report, subject=label)


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
