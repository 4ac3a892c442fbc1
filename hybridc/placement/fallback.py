"""Nodes that their device's target cannot compile, and the device that runs them instead.

Only lowering knows what can be compiled. So the parts are lowered, and a device that refuses a node
is no longer a choice for it: the placement is decided anew, until nothing is refused any more. What
all devices refuse, the fallback device runs. Each turn rules out at least one device for one node,
and most models need one turn.

    decide --> cut into parts --> lower each --> refused? -- no --> done
      ^                                             | yes
      +------ not this device for these nodes <-----+

Where costs decide, every target is first shown the whole model. Otherwise each turn could move
other nodes onto a device that refuses them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from hybridc.errors import UnsupportedError
from hybridc.frontend.shapes import Range
from hybridc.placement.decide import Decision, Request, decide
from hybridc.placement.group import NO_NUMBERS, is_numeric, read_values
from hybridc.placement.plan import Part, Plan, make_plan
from hybridc.placement.rules import Rules
from hybridc.runtime.parts import SESSION_KIND
from hybridc.targets.protocol import Device, Lowered, ResultType, Section
from hybridc.targets.registry import find_target, strict_target

DEFAULT_FALLBACK = Device(f"{SESSION_KIND}:0", SESSION_KIND)

_Refused = dict[ir.Node, dict[Device, str]]


@dataclass(frozen=True)
class Placed:
    """A plan with each part lowered.

    Attributes:
        plan: The parts.
        lowered: Each part in its target's own form.
        refusals: Why nodes are on the fallback device, by node.
        decision: What the plan rests on.
    """

    plan: Plan
    lowered: tuple[Lowered, ...]
    refusals: Mapping[ir.Node, str]
    decision: Decision


def place_and_lower(
    graph: ir.Graph, request: Request, fallback: bool, ranges: Mapping[str, Range]
) -> Placed:
    """Place the graph's nodes and lower the parts.

    Args:
        graph: The model after the passes. What lowering finds out about types is set on it.
        request: Devices, rules, and what is known about costs.
        fallback: Whether ONNX Runtime may run what cannot be compiled.
        ranges: Sizes that the dynamic dimensions can have, by name.

    Raises:
        UnsupportedError: Some nodes cannot be compiled and there is no fallback, or it cannot
            run them either, or a rule forbids it.
    """
    refuge = fallback_device(request.devices)
    refused: _Refused = {}
    if request.hardware is not None and request.fixed is None:
        for device in _distinct_targets(request.devices, refuge):
            alone = Request((device,), Rules(), strict_math=request.strict_math)
            _settle(graph, alone, refuge, True, ranges, refused)
        _share(refused, request.devices)
    placed = _settle(graph, request, refuge, fallback, ranges, refused)
    if placed.refusals and not fallback:
        raise _unsupported(placed.refusals, "these nodes cannot be compiled:")
    return placed


def fallback_device(devices: Sequence[Device]) -> Device:
    """The device for what no other can run: one of the devices given, or one of its own."""
    return next((d for d in devices if d.kind == SESSION_KIND), DEFAULT_FALLBACK)


def _distinct_targets(devices: Sequence[Device], refuge: Device) -> list[Device]:
    """One device of each target, where there are several to choose from."""
    found = {(d.kind, d.specification): d for d in reversed(devices) if d != refuge}
    return list(reversed(found.values())) if len(found) > 1 else []


def _settle(
    graph: ir.Graph,
    request: Request,
    refuge: Device,
    fallback: bool,
    ranges: Mapping[str, Range],
    refused: _Refused,
) -> Placed:
    """Place and lower until no target refuses a node any more; adds to what was refused."""
    while True:
        decision = decide(graph, request, refused, refuge)
        devices = decision.devices_of_groups()
        plan = make_plan(graph, decision.groups, devices, request.devices[0], request.remote)
        if request.remote is None:
            idle = tuple(device for device in request.devices if device not in plan.devices())
            plan = dataclasses.replace(plan, idle=idle)
        refusals = _refusals(decision, refuge)
        sections = [part.section(graph.opset_imports, ranges) for part in plan.parts]
        pairs = list(zip(plan.parts, sections, strict=True))
        strict_math = request.strict_math
        lowered, found = _lower_parts(pairs, strict_math, refuge, fallback, refusals)
        if not found:
            return Placed(plan, lowered, refusals, decision)
        for node, (device, reason) in found.items():
            refused.setdefault(node, {})[device] = reason
        _share(refused, request.devices)


def _share(refused: _Refused, devices: Sequence[Device]) -> None:
    """What one device refuses, every device with the same target does."""
    for reasons in refused.values():
        for device, reason in list(reasons.items()):
            for other in devices:
                if (other.kind, other.specification) == (device.kind, device.specification):
                    reasons.setdefault(other, reason)


def _refusals(decision: Decision, refuge: Device) -> dict[ir.Node, str]:
    """Why nodes are on the fallback device, for those that another device refused."""
    found = {}
    for group, device in zip(decision.groups, decision.devices_of_groups(), strict=True):
        for node in group.nodes:
            reasons = dict.fromkeys(decision.refused.get(node, {}).values())
            if device == refuge and reasons:
                found[node] = "; ".join(reasons)
    return found


def _lower_parts(
    parts: Sequence[tuple[Part, Section]],
    strict_math: bool,
    refuge: Device,
    fallback: bool,
    moved: Mapping[ir.Node, str],
) -> tuple[tuple[Lowered, ...], dict[ir.Node, tuple[Device, str]]]:
    """Lower each part in order, as far as that goes; returns also who refused nodes, and why."""
    lowered = []
    refused: dict[ir.Node, tuple[Device, str]] = {}
    for part, section in parts:
        reasons: dict[ir.Node, str] = {}
        if part.device == refuge:
            for value in part.outputs:
                _name_dimensions(value)
            if not fallback:
                continue
        else:
            reasons = dict(unfit_nodes(section))
        if not refused and not reasons:
            try:
                lowered.append(_lower(part, section, strict_math))
            except UnsupportedError as error:
                if part.device == refuge:
                    raise _without_refuge(error, moved) from error
                reasons = _by_node(error, part)
        refused |= {node: (part.device, reason) for node, reason in reasons.items()}
    return tuple(lowered), refused


def _lower(part: Part, section: Section, strict_math: bool) -> Lowered:
    target = strict_target(find_target(part.device.kind), strict_math)
    lowered = target.lower(section, part.device.specification)
    for value, result in zip(part.outputs, lowered.results, strict=True):
        if result is not None:
            _note_result(value, result)
    return lowered


def unfit_nodes(section: Section) -> Iterator[tuple[ir.Node, str]]:
    """Nodes that work on something that only the fallback carries, each with the reason."""
    crossing = set(section.inputs)
    for node in section.nodes:
        for value in (*read_values(node), *node.outputs):
            if value.dtype in NO_NUMBERS:
                yield node, f"{value.name!r} holds {NO_NUMBERS[value.dtype]}"
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
