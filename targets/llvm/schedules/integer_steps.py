"""The steps that kernels of integer products are written of: operands, products, places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.finishing import Finish
from hybridc.targets.llvm.schedules.integer_tiles import PAIRS, QUADS, SINGLE, Geometry
from hybridc.targets.llvm.schedules.loops import PARALLEL_WORK, power_of_two_below
from hybridc.targets.llvm.schedules.statements import bind, int64, sequence, serial_loop
from tvm import tirx

_QUADS = {
    (16, "uint8"): "llvm.x86.avx512.vpdpbusd.512",
    (8, "uint8"): "llvm.x86.avx512.vpdpbusd.256",
    (4, "uint8"): "llvm.aarch64.neon.usdot.v4i32.v16i8",
    (4, "int8"): "llvm.aarch64.neon.sdot.v4i32.v16i8",
}
"""Instructions that multiply quads, by lanes and type of the data."""

COPIED = 16
"""Elements of the widest vector of data that is copied or transformed."""


@dataclass(frozen=True)
class IntegerKernel:
    """What the statements of an integer product are written from.

    Attributes:
        geometry: Its sizes, and the tile that its instruction multiplies.
        cpu: The processor.
        data: The buffer of the data.
        weight: That of the packed weights.
        output: That of the sums, which only its shape is read of.
        finish: How a vector of sums becomes results.
    """

    geometry: Geometry
    cpu: Cpu
    data: Any
    weight: Any
    output: Any
    finish: Finish


def tasks(geometry: Geometry, total: int, body: Callable[[Any], Any]) -> Any:
    """A loop over tasks, parallel if there is enough to compute; no loop for one alone."""
    if total == 1:
        return body(int64(0))
    variable = tirx.Var("task", "int64")
    is_parallel = geometry.pixels * geometry.filters * geometry.steps >= PARALLEL_WORK
    kind = tirx.ForKind.PARALLEL if is_parallel else tirx.ForKind.SERIAL
    return tirx.For(variable, int64(0), int64(total), kind, body(variable))


def begin_sums(geometry: Geometry, rows: int, statements: list[Any]) -> dict[tuple[int, int], Any]:
    """Accumulators of a register tile by row and vector, which added statements set to zero."""
    g, sums = geometry, {}
    zero = tirx.Broadcast(tirx.const(0, "int32"), g.lanes)
    for row in range(rows):
        for vector in range(g.vectors):
            buffer = tirx.decl_buffer((g.lanes,), "int32", f"sum_{row}_{vector}")
            sums[row, vector] = buffer
            statements.append(tirx.AllocBuffer(buffer))
            statements.append(tirx.BufferStore(buffer, zero, [ramp(int64(0), g.lanes)]))
    return sums


def ramp(start: Any, lanes: int) -> Any:
    """Indices of neighbors."""
    return tirx.Ramp(start, int64(1), lanes)


def widened(load: Any, geometry: Geometry) -> Any:
    """Weights as the instruction takes them."""
    g = geometry
    dtype = {SINGLE: "int32", PAIRS: "int16", QUADS: "int8"}[g.group]
    wide = f"{dtype}x{g.lanes * g.group}"
    return load if str(load.source.dtype) == dtype else load.astype(wide)


def in_all_lanes(geometry: Geometry, data: Any, indices: Sequence[Any]) -> Any:
    """A group of channels, the first of which has the given indices, in all lanes."""
    g = geometry
    *front, first = indices
    word = tirx.reinterpret("int32", tirx.BufferLoad(data, [*front, ramp(first, g.group)]))
    return tirx.reinterpret(f"{data.dtype}x{g.lanes * g.group}", tirx.Broadcast(word, g.lanes))


def plus_products(geometry: Geometry, cpu: Cpu, total: Any, value: Any, weight: Any) -> Any:
    """Sums with the products of one instruction added."""
    g = geometry
    if g.group == SINGLE:
        return total + value * weight
    result = f"int32x{g.lanes}"
    if g.group == QUADS:
        kind = str(value.ty.dtype).split("x")[0]
        return tirx.call_llvm_pure_intrin(result, _QUADS[g.lanes, kind], total, value, weight)
    if g.lanes == 16 and "avx512vnni" in cpu.llvm_features:
        name = "llvm.x86.avx512.vpdpwssd.512"
        return tirx.call_llvm_pure_intrin(result, name, total, value, weight)
    name = "llvm.x86.avx512.pmaddw.d.512" if g.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    return total + tirx.call_llvm_pure_intrin(result, name, value, weight)


def place_of(pixel: Any, dims: Sequence[int], statements: list[Any]) -> list[Any]:
    """The indices of a pixel in axes of these sizes, bound by statements added to the list."""
    place: list[Any] = []
    rest = pixel
    for dim in reversed(dims[1:]):
        place.append(bind(tirx.floormod(rest, int64(dim)), statements))
        rest = tirx.floordiv(rest, int64(dim))
    return [*([bind(rest, statements)] if dims else []), *reversed(place)]


def finish_vectors(finish: Finish, vectors: Sequence[Any], place: Sequence[Any], lanes: int) -> Any:
    """Finish neighboring vectors of sums, two at once: these are narrowed with fewer instructions.

    Args:
        finish: How a vector is finished.
        vectors: Their values.
        place: Of the first element.
        lanes: Elements of a vector.
    """
    *front, start = place
    statements: list[Any] = []
    for first in range(0, len(vectors), 2):
        pair = vectors[first : first + 2]
        width = len(pair) * lanes
        buffer = tirx.decl_buffer((width,), "int32", "sums")
        statements.append(tirx.AllocBuffer(buffer))
        for number, value in enumerate(pair):
            at = [ramp(int64(number * lanes), lanes)]
            statements.append(tirx.BufferStore(buffer, value, at))
        statements.append(finish([*front, start + first * lanes], buffer, width))
    return sequence(statements)


def count_from(first: Any, most: int, total: int) -> Any:
    """How many of ``total`` there are from ``first`` on, at most ``most``."""
    return most if total % most == 0 else tirx.min(int64(most), int64(total) - first)


def in_vectors(run: int, body: Callable[[Any, int], Any]) -> Any:
    """What ``body`` does for vectors of neighbors, of which the last ends where they do.

    Args:
        run: How many neighbors there are.
        body: From the offset and the length of a vector to a statement, which may be repeated.
    """
    width = min(COPIED, power_of_two_below(run))
    whole = serial_loop(run // width, lambda number: body(number * width, width), "vector")
    return sequence([whole, body(int64(run - width), width)]) if run % width else whole


def multiply(
    geometry: Geometry,
    cpu: Cpu,
    sums: Mapping[tuple[int, int], Any],
    sources: Callable[[Any], Sequence[tuple[Any, Sequence[Any]]]],
    factor: Callable[[Any, int], Any],
) -> Any:
    """A loop that adds the products of all steps to the sums of a register tile.

    Args:
        geometry: The kernel.
        cpu: The processor.
        sums: Accumulators by row and vector.
        sources: From a step to the buffer and the place of each row's group of channels.
        factor: From a step and the number of a vector to weights as the instruction takes them.
    """
    everything = [ramp(int64(0), geometry.lanes)]

    def step(number: Any) -> Any:
        statements: list[Any] = []
        factors = [bind(factor(number, v), statements) for v in range(geometry.vectors)]
        for row, (buffer, place) in enumerate(sources(number)):
            value = bind(in_all_lanes(geometry, buffer, place), statements)
            for vector, weights in enumerate(factors):
                total = sums[row, vector]
                added = tirx.BufferLoad(total, everything)
                added = plus_products(geometry, cpu, added, value, weights)
                statements.append(tirx.BufferStore(total, added, everything))
        return sequence(statements)

    return serial_loop(geometry.steps, step, "step")
