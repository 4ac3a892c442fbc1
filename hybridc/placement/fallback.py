"""Nodes that their device's target cannot compile, and the device that runs them instead.

Only lowering knows what can be compiled. So the parts are lowered, and what is refused moves to
the fallback device, which cuts the graph anew, until nothing is refused any more. Each turn moves
at least one node, and most models need one turn.

    place --> cut into parts --> lower each --> refused? -- no --> done
      ^                                            | yes
      +---- these nodes on the fallback device <---+
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from hybridc.errors import UnsupportedError
from hybridc.frontend.shapes import Range
from hybridc.placement.group import is_numeric, read_values
from hybridc.placement.pin import Pin, matches
from hybridc.placement.plan import Part, Plan, make_plan
from hybridc.targets.protocol import Device, Lowered, ResultType, Section
from hybridc.targets.registry import find_target

DEFAULT_FALLBACK = Device("onnxruntime:0", "onnxruntime")


@dataclass(frozen=True)
class Placed:
    """A plan with each part lowered.

    Attributes:
        plan: The parts.
        lowered: Each part in its target's own form.
        refusals: Why nodes are on the fallback device, by node.
    """

    plan: Plan
    lowered: tuple[Lowered, ...]
    refusals: Mapping[ir.Node, str]


def place_and_lower(
    graph: ir.Graph,
    devices: Sequence[Device],
    pins: Sequence[Pin],
    fallback: bool,
    ranges: Mapping[str, Range],
) -> Placed:
    """Place the graph's nodes and lower the parts.

    Args:
        graph: The model after the passes. What lowering finds out about types is set on it.
        devices: Devices to choose from; the first is the default.
        pins: Nodes placed by hand.
        fallback: Whether ONNX Runtime may run what cannot be compiled.
        ranges: Sizes that the dynamic dimensions can have, by name.

    Raises:
        UnsupportedError: Some nodes cannot be compiled and there is no fallback, or it cannot
            run them either, or a pin forbids it.
    """
    refuge = next((d for d in devices if d.kind == DEFAULT_FALLBACK.kind), DEFAULT_FALLBACK)
    refusals: dict[ir.Node, str] = {}
    while True:
        plan = make_plan(graph, devices, pins, dict.fromkeys(refusals, refuge))
        lowered, refused = _lower_parts(
            plan, graph.opset_imports, ranges, refuge, fallback, refusals
        )
        if not refused:
            break
        refusals.update(refused)
        _refuse_pinned(refused, pins, refuge)
    if refusals and not fallback:
        raise _unsupported(refusals, "these nodes cannot be compiled:")
    return Placed(plan, lowered, refusals)


def _lower_parts(
    plan: Plan,
    opsets: Mapping[str, int],
    ranges: Mapping[str, Range],
    refuge: Device,
    fallback: bool,
    moved: Mapping[ir.Node, str],
) -> tuple[tuple[Lowered, ...], dict[ir.Node, str]]:
    """Lower each part in order, as far as that goes; returns also why nodes were refused."""
    lowered = []
    refused: dict[ir.Node, str] = {}
    for part in plan.parts:
        if part.device == refuge:
            for value in part.outputs:
                _name_dimensions(value)
            if not fallback:
                continue
        else:
            refused |= dict(unfit_nodes(part.section(opsets, ranges)))
        if not refused:
            try:
                lowered.append(_lower(part, opsets, ranges))
            except UnsupportedError as error:
                if part.device == refuge:
                    raise _without_refuge(error, moved) from error
                refused |= _by_node(error, part)
    return tuple(lowered), refused


def _lower(part: Part, opsets: Mapping[str, int], ranges: Mapping[str, Range]) -> Lowered:
    target = find_target(part.device.kind)
    lowered = target.lower(part.section(opsets, ranges), part.device.specification)
    for value, result in zip(part.outputs, lowered.results, strict=True):
        if result is not None:
            _note_result(value, result)
    return lowered


def unfit_nodes(section: Section) -> Iterator[tuple[ir.Node, str]]:
    """Nodes that work on something that only the fallback carries, each with the reason."""
    crossing = set(section.inputs)
    for node in section.nodes:
        for value in (*read_values(node), *node.outputs):
            if value.dtype == ir.DataType.STRING:
                yield node, f"{value.name!r} holds strings"
            elif value not in crossing:
                continue
            elif not is_numeric(value):
                yield node, f"its input {value.name!r} is not a tensor but {value.type}"
            elif value.shape is None or value.dtype is None:
                yield node, f"the shape of its input {value.name!r} is not known"


def _by_node(error: UnsupportedError, part: Part) -> dict[ir.Node, str]:
    """The reasons of a refusal by node; raises the error again if it names none."""
    nodes = {str(node.name): node for node in part.nodes}
    found = {nodes[name]: reason for name, _, reason in error.reasons if name in nodes}
    if not found:
        raise error
    return found


def _refuse_pinned(refused: Mapping[ir.Node, str], pins: Sequence[Pin], refuge: Device) -> None:
    for node, reason in refused.items():
        for pin in pins:
            if pin.device != refuge.name and matches(pin, node):
                message = f"--pin {pin.pattern}={pin.device} cannot be kept:"
                raise _unsupported({node: reason}, message)


def _without_refuge(error: UnsupportedError, moved: Mapping[ir.Node, str]) -> UnsupportedError:
    """The refuge's refusal, with why the nodes were moved there, if they were."""
    if not moved:
        return error
    first, *_ = str(error).splitlines()
    return _unsupported(moved, f"these nodes cannot be compiled, and {first}")


def _unsupported(refusals: Mapping[ir.Node, str], message: str) -> UnsupportedError:
    reasons = [(str(node.name), node.op_type, reason) for node, reason in refusals.items()]
    return UnsupportedError(message, tuple(reasons))


def _note_result(value: ir.Value, result: ResultType) -> None:
    """Set what lowering found out on a value that crosses between parts."""
    dims = [dim if isinstance(dim, int) else ir.SymbolicDim(str(dim)) for dim in result.shape]
    value.shape = ir.Shape(dims)
    value.dtype = ir.DataType.from_numpy(np.dtype(getattr(ml_dtypes, result.dtype, result.dtype)))


def _name_dimensions(value: ir.Value) -> None:
    """Give dimensions that only running will tell a name each."""
    if value.shape is None:
        return
    dims = list(value.shape)
    for axis, dim in enumerate(dims):
        if not isinstance(dim, int) and dim.value is None:
            dims[axis] = ir.SymbolicDim(f"{value.name}_{axis}")
    value.shape = ir.Shape(dims)
