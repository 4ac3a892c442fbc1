"""The convolutions of a part for which the algorithm can be measured on a GPU, each built alone.

One is a kernel or several, and its weights depend on the algorithm. So what is measured is a graph
of one convolution, with its weights packed and its kernels fused, called some times in a row as
kernels are (:mod:`.tunable`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from hybridc.targets.gpu.schedules.winograd_choice import (
    NONE,
    Geometry,
    winograd_choices,
    winograd_problem,
)
from hybridc.targets.gpu.tunable import MOST_BYTES, Bench, KernelCall, Runs, tunable_kernels
from hybridc.targets.gpu.winograd import DTYPE, can_choose, geometry_of
from hybridc.targets.llvm.layout.graph import bindings_of
from hybridc.targets.llvm.layout.main_writer import weight_names
from hybridc.targets.llvm.schedules.winograd_transforms import TAPS
from hybridc.targets.tuning import (
    UNTUNED,
    Figures,
    Run,
    TunableKernel,
    Tuning,
    each_problem_once,
)
from tvm import relax

from hybridc.bundle.tensors import Array

Fuse = Callable[
    [tvm.IRModule, Mapping[str, Array], Tuning], tuple[tvm.IRModule, Mapping[str, Array]]
]
"""From a lowered module with its weights, and choices, to fused kernels with theirs."""


@dataclass(frozen=True)
class Convolutions:
    """Builds convolutions alone, with an algorithm each.

    Attributes:
        fuse: Makes their kernels.
        bench: Where they are built and measured.
    """

    fuse: Fuse
    bench: Bench

    def tunable(self, module: tvm.IRModule, weights: Mapping[str, Array]) -> list[TunableKernel]:
        """The convolutions of a lowered module for which there is something to choose."""
        if not can_choose(self.bench.limits):
            return []
        names = weight_names(module, weights)
        values = (getattr(binding, "value", None) for binding in bindings_of(module["main"]))
        found = Counter(geometry_of(value, names) for value in values)
        size = min(sum(array.nbytes for array in weights.values()), MOST_BYTES)
        kernels = [self._kernel(g, count, size) for g, count in found.items() if g is not None]
        return each_problem_once(kernel for kernel in kernels if len(kernel.candidates) > 1)

    def _kernel(self, geometry: Geometry, count: int, weight_bytes: int) -> TunableKernel:
        def build(choice: Figures) -> Run | None:
            return self.start(geometry, choice, self.code(geometry, choice), weight_bytes)

        g = geometry
        cost = TAPS**2 * g.channels * g.filters * g.batch * g.rows * g.columns * count
        candidates = list(winograd_choices(g))
        problem = winograd_problem(g)
        return TunableKernel(problem, float(cost), candidates, build, self.bench.at_once)

    def code(self, geometry: Geometry, choice: Figures) -> bytes:
        """A library that calls a convolution in a row.

        Args:
            geometry: The convolution.
            choice: Its algorithm, one of :func:`winograd_choices`.
        """
        tuning = Tuning(((winograd_problem(geometry), choice),))
        filters = np.zeros((geometry.filters, geometry.channels, TAPS, TAPS), DTYPE)
        fused, _ = self.fuse(convolution_alone(geometry), {"filters": filters}, tuning)
        call = _call(geometry, choice)
        return self.bench.build(runs_in_a_row(fused, call, self.bench.at_once), tuning)

    def start(
        self, geometry: Geometry, choice: Figures, code: bytes, weight_bytes: int
    ) -> Run | None:
        """Runs of such a library; ``None`` if the device does not start them.

        Args:
            geometry: The convolution.
            choice: Its algorithm.
            code: The library.
            weight_bytes: Bytes of weights to read between two calls.
        """
        return Runs(_call(geometry, choice), weight_bytes, self.bench).start(code)


def tunable_module(
    module: tvm.IRModule, weights: Mapping[str, Array], convolutions: Convolutions
) -> list[TunableKernel]:
    """All of a lowered module for which there is something to choose, kernels first.

    Args:
        module: What is compiled.
        weights: Its weights.
        convolutions: Where its convolutions, and all other kernels too, are built and measured.
    """
    fused, packed = convolutions.fuse(module, weights, UNTUNED)
    size = sum(array.nbytes for array in packed.values())
    return [
        *tunable_kernels(fused, size, convolutions.bench),
        *convolutions.tunable(module, weights),
    ]


def _call(geometry: Geometry, choice: Figures) -> KernelCall:
    """What a convolution with an algorithm takes and gives."""
    g = replace(geometry, size=winograd_choices(geometry)[choice])
    taps = (g.filters, g.channels, TAPS, TAPS)
    shapes = (
        (g.batch, g.channels, g.height, g.width),
        taps if g.size == NONE else (g.positions, g.filters, g.channels),
        (g.batch, g.filters, g.rows, g.columns),
    )
    data, filters, result = (relax.TensorType(shape, DTYPE) for shape in shapes)
    return KernelCall((data, filters), result, frozenset({1}), 1)


def convolution_alone(geometry: Geometry) -> tvm.IRModule:
    """A lowered module that computes one convolution."""
    g = geometry
    builder = relax.BlockBuilder()
    data = relax.Var("data", relax.TensorType((g.batch, g.channels, g.height, g.width), DTYPE))
    filters = relax.TensorType((g.filters, g.channels, TAPS, TAPS), DTYPE)
    weights = relax.Var("weights", relax.TupleType([filters]))
    bottom, right = (
        rows + TAPS - 1 - height - top
        for rows, height, top in ((g.rows, g.height, g.top), (g.columns, g.width, g.left))
    )
    padding = [g.top, g.left, bottom, right]
    with builder.function("main", [data, weights]):
        with builder.dataflow():
            own = builder.emit(relax.TupleGetItem(weights, 0))
            output = builder.emit_output(relax.op.nn.conv2d(data, own, padding=padding))
        builder.emit_func_output(output)
    return builder.get()


def runs_in_a_row(fused: tvm.IRModule, call: KernelCall, times: int) -> tvm.IRModule:
    """Fused kernels whose ``main`` calls them so many times and gives the last result.

    Args:
        fused: Kernels, with a ``main`` that takes an input and a tuple of one weight.
        call: Types of both.
        times: How often they are called.

    Returns:
        The module; its ``main`` takes one tuple with the operands of all calls.
    """
    main, builder = fused["main"], relax.BlockBuilder(fused)
    operands = relax.Var("operands", relax.TupleType(call.operands * times))
    bindings = list(bindings_of(main))
    with builder.function("repeated", [operands]):
        with builder.dataflow():
            for first in range(0, 2 * times, 2):
                data, weight = (
                    builder.emit(relax.TupleGetItem(operands, place))
                    for place in (first, first + 1)
                )
                known: dict[Any, Any] = {main.params[0]: data}
                for binding in bindings:
                    known[binding.var] = _repeated(binding.value, known, weight, builder)
            result = builder.emit_output(known[main.body.body])
        builder.emit_func_output(result)
    module = builder.get()
    function = module["repeated"].with_attr("global_symbol", "main")
    kernels = {v: f for v, f in module.functions.items() if v.name_hint not in ("main", "repeated")}
    return tvm.IRModule({**kernels, "main": function})


def _repeated(
    value: Any, known: Mapping[Any, Any], weight: Any, builder: relax.BlockBuilder
) -> Any:
    """What a value of ``main`` is in a further call."""
    if isinstance(value, relax.TupleGetItem):
        return weight
    if isinstance(value, relax.Var):
        return known[value]
    operands = relax.Tuple([known[operand] for operand in value.args[1].fields])
    return builder.emit(relax.call_tir(value.args[0], operands, value.ty_args[0]))
