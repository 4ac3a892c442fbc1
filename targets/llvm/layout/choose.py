"""Which kernels' results are blocked: a minimum cut over the whole graph.

On the source's side of the cut a result is blocked, on the sink's it is plain. A change of layout
is paid once per tensor, however many kernels want the other layout; a node of its own stands for
the copy. What is read or written outside of the graph is plain.
"""

from __future__ import annotations

import math
from typing import Any

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.convolutions import (
    best_geometry,
    blocked_cycles,
    copy_cycles,
    plain_cycles,
)
from hybridc.targets.llvm.layout.cut import FOREVER, SINK, SOURCE, Network
from hybridc.targets.llvm.layout.graph import Graph, Kernel
from hybridc.targets.llvm.schedules.blocked_tiles import Geometry


def choose_blocked(graph: Graph, cpu: Cpu) -> set[Any]:
    """The variables of the kernels whose results are to be blocked."""
    network = Network()
    wants_blocked: set[Any] = set()
    wants_plain = graph.plain_uses & set(graph.kernels)
    for kernel in graph.kernels.values():
        blocked, plain = _prices(graph, kernel, cpu)
        network.add(kernel.variable, SINK, blocked)
        network.add(SOURCE, kernel.variable, plain)
        for operand in kernel.carried(graph):
            network.add(("plain copy", operand), kernel.variable, FOREVER)
            wants_plain.add(operand)
            if is_blocked_source(graph, kernel):
                network.add(kernel.variable, ("blocked copy", operand), FOREVER)
                wants_blocked.add(operand)
    for variable in wants_plain & set(graph.kernels):
        network.add(variable, ("plain copy", variable), _transform(graph, variable))
    for variable in wants_blocked:
        origin = variable if variable in graph.kernels else SINK
        network.add(("blocked copy", variable), origin, _transform(graph, variable))
    for variable in graph.plain_uses & set(graph.kernels):
        network.add(("plain copy", variable), SINK, FOREVER)
    side = network.source_side()
    return {variable for variable in graph.kernels if variable in side}


def is_blocked_source(graph: Graph, kernel: Kernel) -> bool:
    """Whether a blocked kernel wants its input blocked.

    A convolution of a few channels that come from outside reads them plain instead.
    """
    convolution = kernel.convolution
    if convolution is None or convolution.is_depthwise or kernel.operands[0] in graph.kernels:
        return True
    return convolution.found.groups * convolution.found.channels >= graph.lanes


def geometry_of(graph: Graph, kernel: Kernel, cpu: Cpu) -> Geometry:
    """How a convolution is computed with a blocked result."""
    assert kernel.convolution is not None
    lanes = graph.lanes if is_blocked_source(graph, kernel) else 1
    return best_geometry(kernel.convolution, graph.lanes, lanes, cpu)


def _prices(graph: Graph, kernel: Kernel, cpu: Cpu) -> tuple[float, float]:
    """Cycles with a blocked and with a plain result."""
    if kernel.convolution is not None:
        geometry = geometry_of(graph, kernel, cpu)
        # A geometry may stand for one of the images only.
        repeats = kernel.convolution.found.batch // geometry.batch
        return repeats * blocked_cycles(geometry, cpu), plain_cycles(kernel.convolution, cpu)
    shape = graph.typical_sizes(kernel.variable)
    channels = -(-shape[1] // graph.lanes) * graph.lanes
    blocked = math.prod((shape[0], channels, *shape[2:]))
    return copy_cycles(blocked), copy_cycles(math.prod(shape))


def _transform(graph: Graph, variable: Any) -> float:
    """Cycles for changing a tensor's layout; a tensor of one pixel per channel is cheap."""
    return copy_cycles(math.prod(graph.typical_sizes(variable))) + 1.0
