"""Which convolutions Winograd's algorithm computes faster, and how their tiles are cut.

All tiles of all images are cut into chunks, and the panels of filters into groups; a task computes
a chunk for a group. Large chunks read the weights less often, small ones keep the transformed
inputs in the cache; large groups transform the inputs less often, small ones keep the weights in
the cache, and give more threads something to do. What is counted, in cycles:

    inputs      one transform for each tile, block of channels and group
    products    by the register tiles of pointwise convolutions
    outputs     one transform for each tile and block of filters
    traffic     weights and transformed inputs that the cache does not keep

Transformed weights are 16 or 36 matrices in place of 9. Where few pixels use them, reading them
takes longer than the multiplications that they save: such layers stay direct, or take small tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.schedules.blocked_tiles import (
    Geometry,
    Tiling,
    choose_tiling,
    problem_of,
)
from hybridc.targets.llvm.schedules.emitter import CACHE_BYTES
from hybridc.targets.llvm.schedules.winograd_transforms import SIZES, TAPS
from hybridc.targets.tuning import Figures, figures, require

INPUT_CYCLES = 8
"""For each element of a vector's worth of transformed tiles: loads, two transforms, store."""

OUTPUT_CYCLES = 5
"""The same for a tile that is transformed back and finished."""

MEMORY_BYTES = 4
"""Bytes of weights that arrive from memory in a cycle, when they are read for the first time."""

TRAFFIC_BYTES = 8
"""Bytes that arrive from behind the second-level cache in a cycle, when they are read again."""

MAX_TILES = 64
"""Tiles of a chunk, at most."""

SCRATCH_BYTES = 4 * 1024 * 1024
"""Transformed inputs that a task, or all of them together, may keep."""

MAX_VECTORS = 6
"""Vectors of a panel, at most."""

THREADS = (1, 2, 8)
"""Numbers of threads whose mean is to be fast."""

TASK_CYCLES = 1000
"""Cycles around each task: its memory, and what it reads for the first time."""

MARGIN = 1.1
"""How much faster larger tiles must seem than smaller ones, and these than direct convolution: they
take more memory for weights, also in files."""


@dataclass(frozen=True)
class Chunking:
    """How tiles and panels are shared among tasks.

    Attributes:
        tiles: Tiles of a chunk; in the last one some may be missing.
        chunks: Number of chunks.
        panels: Panels of a group; in the last one some may be missing.
        groups: Number of groups.
        is_shared: Whether all inputs are transformed first, for all groups.
        tiling: Register tiles of the products of one chunk and panel.
        cycles: Estimate for the whole convolution.
        shared: The same with what threads cannot share evenly, by :data:`THREADS`.
    """

    tiles: int
    chunks: int
    panels: int
    groups: int
    is_shared: bool
    tiling: Tiling
    cycles: float
    shared: float


def tiles_of(geometry: Geometry) -> tuple[int, int, int]:
    """Tiles of all images, of one image from top to bottom, and from left to right."""
    down = -(-geometry.rows // geometry.winograd)
    across = -(-geometry.columns // geometry.winograd)
    return geometry.batch * down * across, down, across


def product_geometry(geometry: Geometry, tiles: int) -> Geometry:
    """The product of a chunk with one panel, at one position, as a pointwise convolution."""
    return dataclasses.replace(
        geometry,
        batch=1,
        blocks=geometry.vectors,
        height=1,
        width=tiles,
        rows=1,
        columns=tiles,
        kernel_rows=1,
        kernel_columns=1,
        top=0,
        left=0,
        filters=0,
        winograd=0,
    )


def can_transform(geometry: Geometry) -> bool:
    """Whether Winograd's algorithm computes a direct convolution of this geometry."""
    g = geometry
    kernel = (g.kernel_rows, g.kernel_columns) == (TAPS, TAPS)
    is_dense = (g.row_step, g.column_step, g.row_reach, g.column_reach) == (1, 1, 1, 1)
    return kernel and is_dense and g.groups == 1 and g.source_lanes == g.lanes


def fastest(direct: Geometry, cpu: Cpu) -> Geometry:
    """A direct convolution, or the same by Winograd's algorithm where that is, or seems, faster."""
    if not can_transform(direct):
        return direct
    problem = problem_of(direct)
    tuned = cpu.tuning.choice(problem)
    if tuned is not None:
        numbers = dict(tuned)
        if "winograd" not in numbers:
            return direct
        known = {figures(winograd=g.winograd, vectors=g.vectors): g for g in _transformed(direct)}
        found = figures(winograd=numbers["winograd"], vectors=numbers.get("vectors", 0))
        return require(problem, found, known)
    weights = TAPS**2 * direct.channels * direct.blocks * cpu.vector_bytes
    cycles = direct.batch * direct.panels * choose_tiling(direct, cpu, True).cycles
    best, limit = direct, cycles + weights / TRAFFIC_BYTES
    for size in SIZES:
        choices = [g for g in _transformed(direct) if g.winograd == size]
        choice = min(choices, key=lambda g: choose_chunking(g, cpu).shared)
        cycles = choose_chunking(choice, cpu).cycles
        if cycles * MARGIN < limit:
            best, limit = choice, cycles
    return best


def _transformed(direct: Geometry) -> Iterator[Geometry]:
    """A direct convolution by Winograd's algorithm, in all sizes of tiles and panels."""
    for size in SIZES:
        for vectors in range(1, min(direct.blocks, MAX_VECTORS) + 1):
            yield dataclasses.replace(direct, winograd=size, vectors=vectors)


def rank_winograd(direct: Geometry, cpu: Cpu) -> dict[Figures, float]:
    """The best chunking for each size of tiles and panels with its cycles, best first."""
    if cpu.strict_math or not can_transform(direct):
        return {}
    prices = []
    for geometry in _transformed(direct):
        chunking = choose_chunking(geometry, cpu.untuned)
        prices.append((chunking.shared, choice_of(geometry, chunking)))
    return {choice: cycles for cycles, choice in sorted(prices)}


def choice_of(geometry: Geometry, chunking: Chunking) -> Figures:
    """How Winograd's algorithm computes a geometry, in a tuning."""
    return figures(
        winograd=geometry.winograd,
        vectors=geometry.vectors,
        tiles=chunking.tiles,
        panels=chunking.panels,
        is_shared=chunking.is_shared,
    )


@lru_cache(maxsize=4096)
def choose_chunking(geometry: Geometry, cpu: Cpu) -> Chunking:
    """The chunks and groups that were measured to be best, or else seem fastest.

    That is by the cycles in the mean of some numbers of threads.
    """
    problem = problem_of(geometry)
    tuned = cpu.tuning.choice(problem)
    if tuned and set(figures(winograd=geometry.winograd, vectors=geometry.vectors)) <= set(tuned):
        known = {choice_of(geometry, one): one for one in _chunkings(geometry, cpu)}
        return require(problem, tuned, known)
    return min(_chunkings(geometry, cpu), key=lambda chunking: chunking.shared)


def _chunkings(geometry: Geometry, cpu: Cpu) -> Iterator[Chunking]:
    total, _, _ = tiles_of(geometry)
    sizes = {-(-total // -(-total // most)) for most in range(1, min(total, MAX_TILES) + 1)}
    shares = {-(-geometry.panels // groups) for groups in range(1, geometry.panels + 1)}
    for tiles in sorted(sizes):
        inputs = input_bytes(geometry, cpu, tiles)
        if inputs > SCRATCH_BYTES and tiles > 1:
            return
        for panels in sorted(shares):
            yield chunking_of(geometry, cpu, (tiles, panels), False)
            if -(-total // tiles) * inputs <= SCRATCH_BYTES:
                yield chunking_of(geometry, cpu, (tiles, panels), True)


def input_bytes(geometry: Geometry, cpu: Cpu, tiles: int) -> int:
    """Memory for the transformed inputs of some tiles."""
    blocks = -(-geometry.channels // geometry.lanes)
    return (geometry.winograd + TAPS - 1) ** 2 * blocks * tiles * cpu.vector_bytes


def inputs_shape(geometry: Geometry, chunking: Chunking) -> tuple[int, ...]:
    """Shape of the transformed inputs ``(slot, block, position, tile, lane)`` that are kept."""
    g, c = geometry, chunking
    blocks, edge = -(-g.channels // g.lanes), g.winograd + TAPS - 1
    return (c.chunks if c.is_shared else 1, blocks, edge**2, c.tiles, g.lanes)


def products_shape(geometry: Geometry, chunking: Chunking) -> tuple[int, ...]:
    """Shape of the products ``(position, vector, tile, lane)`` of a chunk and one panel."""
    g = geometry
    return ((g.winograd + TAPS - 1) ** 2, g.vectors, chunking.tiles, g.lanes)


@lru_cache(maxsize=1024)
def _tiling(geometry: Geometry, cpu: Cpu, tiles: int) -> Tiling:
    return choose_tiling(product_geometry(geometry, tiles), cpu.untuned, False)


def chunking_of(geometry: Geometry, cpu: Cpu, sizes: tuple[int, int], is_shared: bool) -> Chunking:
    """Chunks of ``sizes[0]`` tiles and groups of ``sizes[1]`` panels, with their cycles."""
    g, positions, (tiles, panels) = geometry, (geometry.winograd + TAPS - 1) ** 2, sizes
    tiling = _tiling(geometry, cpu, tiles)
    chunks, groups = -(-tiles_of(g)[0] // tiles), -(-g.panels // panels)
    blocks = -(-g.channels // g.lanes)
    repeats = 1 if is_shared else groups
    transforms = repeats * blocks * INPUT_CYCLES + g.blocks * OUTPUT_CYCLES
    cycles = chunks * positions * (tiles * transforms + g.panels * tiling.cycles)
    weights = positions * g.channels * g.vectors * cpu.vector_bytes
    is_kept = panels * weights <= CACHE_BYTES
    again = 0 if is_kept else chunks - 1
    cycles += g.panels * weights * (1 / MEMORY_BYTES + again / TRAFFIC_BYTES)
    inputs = input_bytes(g, cpu, tiles)
    if inputs > 2 * CACHE_BYTES:
        cycles += chunks * g.panels * inputs / TRAFFIC_BYTES
    elif is_shared and chunks * inputs > 2 * CACHE_BYTES:
        # Written, and read once by each task.
        cycles += chunks * (1 + groups) * inputs / TRAFFIC_BYTES
    tasks = chunks * groups
    cycles += tasks * TASK_CYCLES
    waits = [threads * -(-tasks // threads) / tasks for threads in THREADS]
    shared = cycles * sum(waits) / len(waits)
    return Chunking(tiles, chunks, panels, groups, is_shared, tiling, cycles, shared)
