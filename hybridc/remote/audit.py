"""What crosses to a server and why it may: the rules on data, checked again on a finished plan.

The placement keeps ``--private`` and ``--residency`` by taking the server away from groups. This
file does not trust that. It follows the tensors of the model on its own, and looks at each one that
a plan sends:

    private x --> a --> T (released) --> b         x and a must stay; T and b may go
               \\--> c ----------------> d          c and d must stay
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from hybridc.bundle.manifest import CrossingSpec
from hybridc.errors import InternalError
from hybridc.placement.group import read_values
from hybridc.placement.plan import Plan
from hybridc.placement.rules import Rules, private_inputs


@dataclass(frozen=True)
class Origin:
    """What a tensor is computed from.

    Attributes:
        private: Private inputs that reach it by a path without a release.
        released: Released tensors that it is, or that it is computed from.
    """

    private: frozenset[str] = frozenset()
    released: frozenset[str] = frozenset()


def origins(
    graph: ir.Graph, private: Sequence[str], releases: Sequence[str]
) -> dict[ir.Value, Origin]:
    """The origin of each input and each computed value; a value that is not there has none."""
    found = {
        value: Origin(frozenset({str(value.name)}))
        for value in graph.inputs
        if value.name in private and value.name not in releases
    }
    found |= {
        value: Origin(released=frozenset({str(value.name)}))
        for value in graph.inputs
        if value.name in private and value.name in releases
    }
    for node in graph:
        sources = [found[value] for value in read_values(node) if value in found]
        origin = Origin(
            frozenset().union(*(source.private for source in sources)),
            frozenset().union(*(source.released for source in sources)),
        )
        for value in node.outputs:
            is_release = value.name in releases and (origin.private or origin.released)
            name = frozenset({str(value.name)})
            found[value] = Origin(released=name) if is_release else origin
    return found


def audit(
    graph: ir.Graph, plan: Plan, rules: Rules, remote: str, sizes: Mapping[str, int]
) -> tuple[CrossingSpec, ...]:
    """What a plan sends to the server and gets back, each tensor with why it may cross.

    Args:
        graph: The model after the passes.
        plan: The parts.
        rules: What must hold.
        remote: Name of the device on the server.
        sizes: Bytes of each tensor by name.

    Raises:
        InternalError: A tensor would cross that must not.
    """
    private = private_inputs(graph, rules)
    found = origins(graph, private, rules.releases)
    inputs = [str(value.name) for value in graph.inputs if value.const_value is None]
    raw = sum(sizes.get(name, 0) for name in private or inputs)
    rows = []
    for value, source, to in _crossings(graph, plan, remote):
        origin = found.get(value, Origin())
        if to == remote and origin.private:
            raise InternalError(
                f"{value.name!r} would reach {to}, and is computed from the private input "
                f"{', '.join(sorted(origin.private))}"
            )
        count = sizes.get(str(value.name), 0)
        reason = _reason(origin, private) if to == remote else "it comes back from the server"
        rows.append(
            CrossingSpec(str(value.name), source, to, count, count / raw if raw else 0.0, reason)
        )
    return tuple(rows)


def _crossings(graph: ir.Graph, plan: Plan, remote: str) -> list[tuple[ir.Value, str, str]]:
    """Each tensor that goes to or comes from the server, with both ends."""
    home = {value: part.device.name for part in plan.parts for value in part.outputs}
    found: dict[tuple[ir.Value, str], tuple[ir.Value, str, str]] = {}
    for part in plan.parts:
        for value in part.inputs:
            ends = (home.get(value, "input"), part.device.name)
            if ends[0] != ends[1] and remote in ends:
                there = remote if ends[1] == remote else "here"  # what comes back comes once
                found.setdefault((value, there), (value, *ends))
    for value in graph.outputs:
        if home.get(value) == remote:
            found.setdefault((value, "here"), (value, remote, "output"))
    return list(found.values())


def _reason(origin: Origin, private: Sequence[str]) -> str:
    if not private:
        return "no input is private"
    if not origin.released:
        return "it is computed from no private input"
    return "released by " + ", ".join(f"--release {name}" for name in sorted(origin.released))
