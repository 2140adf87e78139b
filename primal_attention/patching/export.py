"""Models as graphs that run without this library: ONNX, by way of ``torch.export``."""

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from primal_attention.extras import needing

Axis = str | Dim | None
Dynamic = Mapping[str, Sequence[Axis]]

_LARGEST_FILE = 1 << 30  # bytes of weights; more are written beside the graph
_AXES = "primal_attention.axes"


def export_program(
    model: nn.Module, inputs: Mapping[str, Any], *, dynamic: Dynamic | None = None
) -> ExportedProgram:
    """Export the graph of a model for all sizes of its dynamic axes, without ops of this library.

    Args:
        model: A patched model, a layer or any other model in evaluation mode.
        inputs: Example inputs by name. Tensors become inputs of the graph; anything else, such as
            ``use_cache=False``, is fixed.
        dynamic: The axes of each input, by names that inputs share: ``{"input_ids": ("batch",
            "tokens")}``. None or what is not named keeps its size. A ``torch.export.Dim`` in the
            place of a name has limits, ``Dim("tokens", min=2, max=512)``; a name alone stands for
            all sizes from 2.

    Returns:
        The program. It is a ValueError if one graph cannot hold for all sizes that were asked for.
    """
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() before the export")
    from torch.fx.experimental import _config

    shapes = _dynamic_shapes(inputs, dynamic or {})
    # As torch.onnx does, not to specialise the graph for axes of size 1.
    any_size = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with torch.no_grad(), any_size, _quiet():
        try:
            program = torch.export.export(model, (), dict(inputs), dynamic_shapes=shapes)
        except torch._dynamo.exc.UserError as error:
            raise ValueError(
                "no single graph holds for all sizes of the dynamic axes; pass a Dim with limits "
                f"in the place of a name, or longer example inputs. {error}"
            ) from error
        plain: ExportedProgram = program.run_decompositions({})
    targets = {str(node.target) for node in plain.graph.nodes if node.op == "call_function"}
    left = sorted(target for target in targets if target.startswith("primal_attention."))
    if left:
        raise ValueError(f"the model has ops without a plain form to export: {', '.join(left)}")
    return plain


def export_onnx(
    model: nn.Module,
    inputs: Mapping[str, Any],
    path: str | Path,
    *,
    dynamic: Dynamic | None = None,
) -> None:
    """Write a model as ONNX; the inputs of the graph have the names of the example inputs.

    The limits of the dynamic axes are among the properties of the file, as JSON under
    ``primal_attention.axes``: a runtime does not check them. Weights of more than a gigabyte are
    written beside it.

    Args:
        model: See :func:`export_program`.
        inputs: Example inputs by name.
        path: The file to write.
        dynamic: The axes of each input that may change.
    """
    with needing("the ONNX export needs onnx and onnxscript", "onnx"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    program = export_program(model, inputs, dynamic=dynamic)
    with _quiet():
        onnx_program = torch.onnx.export(program, (), dynamo=True, verbose=False)
    assert onnx_program is not None
    _name_outputs(onnx_program.model.graph, _output_names(model, inputs))
    onnx_program.model.metadata_props[_AXES] = json.dumps(_limits(dynamic or {}))
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    _save(onnx_program, Path(path), external_data=weights > _LARGEST_FILE)


def _dynamic_shapes(inputs: Mapping[str, Any], dynamic: Dynamic) -> dict[str, Any]:
    """The dynamic axes of all inputs as torch wants them."""
    dims: dict[str, Dim] = {}
    shapes: dict[str, Any] = dict.fromkeys(inputs)
    for name, axes in dynamic.items():
        value = inputs.get(name)
        if not isinstance(value, Tensor):
            tensors = [each for each, its in inputs.items() if isinstance(its, Tensor)]
            raise ValueError(f"dynamic has {name!r}, which is no tensor of inputs: {tensors}")
        if isinstance(axes, str) or len(axes) > value.ndim:
            raise ValueError(
                f"dynamic[{name!r}] must name at most the {value.ndim} axes of shape "
                f"{list(value.shape)}, in a tuple, got {axes!r}"
            )
        shapes[name] = {i: _dim(axis, dims) for i, axis in enumerate(axes) if axis is not None}
    return shapes


def _dim(axis: str | Dim, dims: dict[str, Dim]) -> Dim:
    """The axis with its limits, one object for all inputs that have it."""
    if isinstance(axis, str):
        return dims.setdefault(axis, Dim(axis, min=2))
    if dims.setdefault(axis.__name__, axis) is not axis:
        raise ValueError(
            f"dynamic: the axis {axis.__name__!r} is given in two ways; "
            "make one Dim and use it for all inputs"
        )
    return axis


def _limits(dynamic: Dynamic) -> dict[str, list[int | None]]:
    """The least and the largest size of each axis; None where there is no largest."""
    axes = [_dim(axis, {}) for axes in dynamic.values() for axis in axes if axis is not None]
    return {
        axis.__name__: [axis.min, axis.max if isinstance(axis.max, int) else None] for axis in axes
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence a warning of torch about its own code."""
    with warnings.catch_warnings():
        own = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
        warnings.filterwarnings("ignore", own, FutureWarning)
        yield


def _name_outputs(graph: Any, names: list[str]) -> None:
    """Name the outputs, and rename other values of the graph that have these names."""
    for node in graph:
        for value in node.outputs:
            value.name += "_" if value.name in names else ""
    for value, name in zip(graph.outputs, names, strict=False):
        value.name = name


def _output_names(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """The model's own names of its outputs, if it has any."""
    with torch.no_grad():
        outputs = model(**inputs)
    if isinstance(outputs, Tensor):
        return ["output"]
    if isinstance(outputs, Mapping) and all(isinstance(y, Tensor) for y in outputs.values()):
        return list(outputs)
    return []


def _save(onnx_program: Any, path: Path, *, external_data: bool) -> None:
    """Write the file, and the one of its weights, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        onnx_program.save(Path(folder) / path.name, external_data=external_data)
        for written in sorted(Path(folder).iterdir(), reverse=True):  # the weights first
            written.replace(path.parent / written.name)
