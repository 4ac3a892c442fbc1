"""The kernels of a part for which a choice can be measured on a GPU, each built alone.

A kernel is built as it would be in the model, and called by a graph of its own, some times in a
row:

    main(operands of all calls):  kernel(operands 0);  kernel(operands 1);  ...

So a target with CUDA graphs makes one of the calls, and starting a kernel costs what it costs in
the model. Between two calls, a model reads all its other weights, and there may be more of them
than a cache keeps. So each call has weights of its own, as far as the model has so many.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from hybridc.targets.fitting import if_it_fits
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.gpu.schedules import schedule_function
from hybridc.targets.gpu.schedules.fragments import fragment_choices
from hybridc.targets.gpu.schedules.tiles import tile_choices
from hybridc.targets.tuning import (
    Figures,
    Problem,
    Run,
    TunableKernel,
    Tuning,
    each_problem_once,
)
from tvm import relax, tirx
from tvm.s_tir import Schedule

from hybridc.bundle.dtypes import dtype_named
from hybridc.bundle.tensors import Array
from hybridc.runtime.library import load_library
from hybridc.runtime.parts import start_machine
from hybridc.runtime.tensors import Place, allocate, copy, synchronize, to_tensor

MOST_BYTES = 2**26
"""Copies of weights for one candidate, at most; more than the caches of a GPU."""

MOST_COPIES = 64
"""So many copies, at most; more would be of weights too small to matter."""

TRIED = 12
"""So many choices are offered: some give no code of their own."""

_CHOICES = (fragment_choices, tile_choices)
"""What lists the choices of a function, in the order of the schedules' rules."""


@dataclass(frozen=True)
class Bench:
    """Where kernels are built and measured.

    Attributes:
        build: From fused kernels with a ``main``, and choices, to a shared library.
        target: The ``tvm.target.Target``.
        limits: What a block of threads may use.
        place: The device that runs them.
        at_once: Calls in a row.
        keeps_operands: Whether a library must be given the same operands in every run, as one
            with a CUDA graph must.
    """

    build: Callable[[tvm.IRModule, Tuning], bytes]
    target: Any
    limits: Limits
    place: Place
    at_once: int = 1
    keeps_operands: bool = False


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel in the model.

    Attributes:
        operands: Types of its operands.
        result: Type of what it gives.
        weights: Which operands are weights.
        count: Calls of the kernel.
    """

    operands: tuple[relax.TensorType, ...]
    result: Any
    weights: frozenset[int]
    count: int


def tunable_kernels(module: tvm.IRModule, weight_bytes: int, bench: Bench) -> list[TunableKernel]:
    """The kernels of a fused module for which there is something to choose.

    Args:
        module: Kernels, fused and not scheduled, and a ``main`` that calls them, whose last
            parameter are the weights.
        weight_bytes: Size of all weights.
        bench: Where they are measured.
    """
    calls = kernel_calls(module["main"])
    found = []
    for variable, function in module.functions.items():
        call = calls.get(variable.name_hint)
        choices = None if call is None else _choices(function, bench.limits)
        if call is None or choices is None:
            continue
        problem, candidates = choices
        candidate = _Candidate(function, call, problem, min(weight_bytes, MOST_BYTES), bench, [])
        cost = _products(problem) * call.count
        found.append(
            TunableKernel(problem, cost, candidates[:TRIED], candidate.build, bench.at_once)
        )
    return each_problem_once(found)


def _choices(function: Any, limits: Limits) -> tuple[Problem, list[Figures]] | None:
    """What there is to choose for a function; ``None`` if nothing."""
    if not isinstance(function, tirx.PrimFunc):
        return None
    for choices in _CHOICES:
        schedule = Schedule(tvm.IRModule({"main": function}))
        found = if_it_fits(partial(choices, schedule, limits))
        if found is not None:
            return found if len(found[1]) > 1 else None
    return None


def _products(problem: Problem) -> float:
    sizes = dict(problem.sizes)
    return float(math.prod(sizes[name] for name in ("batch", "rows", "columns", "depth")))


def kernel_calls(main: relax.Function) -> Mapping[str, KernelCall]:
    """The first call of each kernel by its name, of those whose sizes are known."""
    found: dict[str, list[KernelCall]] = defaultdict(list)
    weights = _weights(main)

    def visit(node: Any) -> None:
        if not isinstance(node, tvm.ir.Call) or getattr(node.op, "name", "") != "relax.call_tir":
            return
        operands = tuple(node.args[1].fields)
        types = tuple(operand.ty for operand in operands)
        (result,) = node.ty_args
        if len(node.args) == 2 and all(map(_is_static, (*types, *_parts(result)))):
            own = {n for n, operand in enumerate(operands) if _is_weight(operand, weights)}
            found[node.args[0].name_hint].append(KernelCall(types, result, frozenset(own), 1))

    relax.analysis.post_order_visit(main, visit)
    return {name: replace(calls[0], count=len(calls)) for name, calls in found.items()}


def _weights(main: relax.Function) -> set[int]:
    """The variables that are elements of the last parameter, by their handles."""
    bindings = itertools.chain(*(block.bindings for block in main.body.blocks))
    return {
        binding.var.__chandle__()
        for binding in bindings
        if isinstance(binding.value, relax.TupleGetItem)
        and binding.value.tuple_value.same_as(main.params[-1])
    }


def _is_weight(operand: Any, weights: set[int]) -> bool:
    return isinstance(operand, tvm.ir.Constant) or operand.__chandle__() in weights


def _parts(result: Any) -> Sequence[Any]:
    return tuple(result.fields) if isinstance(result, relax.TupleType) else (result,)


def _is_static(kind: Any) -> bool:
    return isinstance(kind, relax.TensorType) and all(
        isinstance(dim, tirx.IntImm) for dim in _shape(kind)
    )


def _shape(kind: relax.TensorType) -> Sequence[Any]:
    return tuple(kind.shape)


def calls_in_a_row(function: tirx.PrimFunc, call: KernelCall, times: int) -> tvm.IRModule:
    """A kernel, and a ``main`` that calls it so many times and gives the last result.

    ``main`` takes one tuple with the operands of all calls.
    """
    builder = relax.BlockBuilder()
    kernel = builder.add_func(function, "kernel")
    count = len(call.operands)
    operands = relax.Var("operands", relax.TupleType(call.operands * times))
    with builder.function("main", [operands]):
        with builder.dataflow():
            for first in range(0, times * count, count):
                places = range(first, first + count)
                own = [builder.emit(relax.TupleGetItem(operands, place)) for place in places]
                last = builder.emit(relax.call_tir(kernel, relax.Tuple(own), call.result))
            result = builder.emit_output(last)
        builder.emit_func_output(result)
    return builder.get()


@dataclass(frozen=True)
class _Candidate:
    """Builds one kernel with choices.

    Attributes:
        function: The kernel.
        call: How the model calls it.
        problem: What is chosen for.
        weight_bytes: Bytes of weights to read between two calls.
        bench: Where it is measured.
        built: What was scheduled so far.
    """

    function: tirx.PrimFunc
    call: KernelCall
    problem: Problem
    weight_bytes: int
    bench: Bench
    built: list[tirx.PrimFunc]

    def build(self, choice: Figures) -> Run | None:
        """The kernel with a choice; ``None`` if it is another choice's, or cannot be started."""
        tuning = Tuning(((self.problem, choice),))
        with self.bench.target:
            scheduled = schedule_function(self.function, replace(self.bench.limits, tuning=tuning))
        if any(tvm_ffi.structural_equal(scheduled, other) for other in self.built):
            return None
        self.built.append(scheduled)
        graph = calls_in_a_row(self.function, self.call, self.bench.at_once)
        runs = Runs(self.call, self.weight_bytes, self.bench)
        return runs.start(self.bench.build(graph, tuning))


@dataclass(frozen=True)
class Runs:
    """Runs calls in a row, on tensors of its own.

    Attributes:
        call: How the model calls what is run.
        weight_bytes: Bytes of weights to read between two calls.
        bench: Where it is measured.
    """

    call: KernelCall
    weight_bytes: int
    bench: Bench

    def start(self, code: bytes) -> Run | None:
        """Runs of a library's ``main``; ``None`` if the device does not start them.

        Args:
            code: The library. Its ``main`` takes one tuple with the operands of all calls.
        """
        step, place = self.bench.at_once, self.bench.place
        main = start_machine(load_library("kernel.so", code), place)["main"]
        turns = itertools.cycle(self._operands())

        def run(count: int) -> None:
            for operands in itertools.islice(turns, count // step):
                main(operands)
            synchronize(place)

        try:
            run(step)
        except RuntimeError:  # too many registers, say, for so many threads
            return None
        return run

    def _operands(self) -> list[Any]:
        """What the graph takes, for one run after the other."""
        copies = self._copies()
        step = self.bench.at_once
        runs = 1 if self.bench.keeps_operands else math.ceil(len(copies) / step)
        sets = itertools.islice(itertools.cycle(copies), runs * step)
        return [tvm_ffi.Array(list(itertools.chain(*group))) for group in _grouped(sets, step)]

    def _copies(self) -> list[list[Any]]:
        """Operands on the device, so many times; they share what is no weight."""
        arrays, place = list(_arrays(self.call.operands)), self.bench.place
        size = sum(arrays[number].nbytes for number in self.call.weights)
        most = self.bench.at_once if self.bench.keeps_operands else MOST_COPIES
        count = max(1, min(self.weight_bytes // size if size else 1, most))
        shared = [_on_device(array, place) for array in arrays]
        copies = [shared]
        for _ in range(count - 1):
            own = {number: _on_device(arrays[number], place) for number in self.call.weights}
            copies.append([own.get(number, tensor) for number, tensor in enumerate(shared)])
        return copies


def _grouped(sets: Iterator[list[Any]], size: int) -> Iterator[list[list[Any]]]:
    while group := list(itertools.islice(sets, size)):
        yield group


def _on_device(array: Array, place: Place) -> Any:
    tensor = to_tensor(array)
    moved = allocate(tensor, place)
    copy(tensor, moved)
    return moved


def _arrays(types: Sequence[relax.TensorType]) -> Iterator[Array]:
    """Seeded numbers for a kernel's operands."""
    random = np.random.default_rng(0)
    for kind in types:
        numbers = random.uniform(0.5, 1.5, [int(dim) for dim in _shape(kind)])
        yield numbers.astype(dtype_named(str(kind.dtype)))
