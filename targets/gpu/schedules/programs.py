"""Kernels written as loops and stores: their outermost parallel loops become threads.

Such a kernel is one block that no schedule primitive can look into. A parallel loop that stands
outermost is shared among threads; everything in it runs in order in one thread. Without such a loop
one thread runs the whole kernel: slow, and right. There is no barrier in a program, so none can
stand in a branch.
"""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi
from hybridc.targets.gpu.limits import Limits
from hybridc.targets.llvm.schedules.blocks import ROOT, changed
from tvm import DataType, tirx
from tvm.s_tir import SBlock

THREADS = 64
"""Threads of a block, few since each does much."""

MAX_SCRATCH = 128 * 1024
"""Most bytes that one thread may keep to itself."""


def schedule_program(function: tirx.PrimFunc, limits: Limits) -> tirx.PrimFunc:
    """Bind a program's outermost parallel loops to threads.

    Args:
        function: A function whose blocks are programs.
        limits: What a block of threads may use.
    """
    threads = min(THREADS, limits.threads)
    body = tvm_ffi.structural_map(
        function.body, (SBlock, lambda block: _bind_block(block, threads))
    )
    return function.with_body(_own_memory(body))


def scratch_bytes(function: tirx.PrimFunc) -> int | None:
    """Bytes that a program allocates; ``None`` if that depends on its inputs."""
    buffers: list[Any] = []
    tvm_ffi.structural_walk(function, (tirx.AllocBuffer, lambda node: buffers.append(node.buffer)))
    total = 0
    for buffer in buffers:
        if not all(isinstance(dim, tirx.IntImm) for dim in buffer.shape):
            return None
        elements = math.prod(int(dim) for dim in buffer.shape)
        total += elements * max(int(DataType(str(buffer.dtype)).bits) // 8, 1)
    return total


def _bind_block(block: SBlock, threads: int) -> SBlock:
    if block.name_hint == ROOT:
        return block
    return changed(block, body=_bind(block.body, threads))


def _bind(statement: Any, threads: int) -> Any:
    """A statement of the host's that launches kernels."""
    if _is_once(statement) and _has_parallel_spine(statement.body):
        return _with(statement, tirx.ForKind.SERIAL, _bind(statement.body, threads))
    if isinstance(statement, tirx.For) and statement.kind == tirx.ForKind.PARALLEL:
        return _grid(statement, threads)
    if isinstance(statement, tirx.SeqStmt) and all(map(_has_parallel_spine, statement.seq)):
        return tirx.SeqStmt([_bind(part, threads) for part in statement.seq])
    return launch(_in_order(statement), tirx.IntImm("int64", 1), 1)


def _has_parallel_spine(statement: Any) -> bool:
    """Whether nothing but parallel loops stands at the top of a statement."""
    if isinstance(statement, tirx.SeqStmt):
        return all(map(_has_parallel_spine, statement.seq))
    if isinstance(statement, tirx.For) and statement.kind == tirx.ForKind.PARALLEL:
        return True
    return _is_once(statement) and _has_parallel_spine(statement.body)


def _is_once(statement: Any) -> bool:
    """Whether a statement is a loop of one iteration."""
    if not isinstance(statement, tirx.For):
        return False
    return isinstance(statement.extent, tirx.IntImm) and int(statement.extent) == 1


def _grid(loop: tirx.For, threads: int) -> Any:
    """A parallel loop as a grid; the last block's idle threads skip the body."""
    dtype = loop.loop_var.ty.dtype
    block, thread = tirx.Var("block", dtype), tirx.Var("thread", dtype)
    place = block * tirx.IntImm(dtype, threads) + thread
    body = _replaced(_in_order(loop.body), loop.loop_var, loop.min + place)
    guarded = tirx.IfThenElse(place < loop.extent, body, None)
    blocks = tirx.floordiv(loop.extent + (threads - 1), threads)
    return launch(guarded, blocks, threads, block, thread)


def launch(
    body: Any, blocks: Any, threads: int, block: Any | None = None, thread: Any | None = None
) -> Any:
    """A kernel: ``body`` under a loop over blocks and one over threads."""
    if block is None or thread is None:
        block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
    count = tirx.IntImm(block.ty.dtype, threads)
    inner = _thread_loop("threadIdx.x", thread, count, body)
    return _thread_loop("blockIdx.x", block, blocks, inner)


def _thread_loop(tag: str, variable: Any, extent: Any, body: Any) -> tirx.For:
    axis = tirx.IterVar(None, tirx.Var(tag, variable.ty.dtype), tirx.IterVar.ThreadIndex, tag)
    zero = tirx.IntImm(variable.ty.dtype, 0)
    kind = tirx.ForKind.THREAD_BINDING
    return tirx.For(variable, zero, extent, kind, body, thread_binding=axis)


def _in_order(statement: Any) -> Any:
    """A statement whose loops all run one iteration after the other."""

    def serial(loop: tirx.For) -> tirx.For:
        if loop.kind in (tirx.ForKind.PARALLEL, tirx.ForKind.VECTORIZED):
            return _with(loop, tirx.ForKind.SERIAL, loop.body)
        return loop

    return tvm_ffi.structural_map(statement, (tirx.For, serial))


def _with(loop: tirx.For, kind: Any, body: Any) -> tirx.For:
    return tirx.For(loop.loop_var, loop.min, loop.extent, kind, body, annotations=loop.annotations)


def _replaced(statement: Any, variable: Any, value: Any) -> Any:
    return tvm_ffi.structural_map(
        statement, (tirx.Var, lambda found: value if found.same_as(variable) else found)
    )


def _own_memory(body: Any) -> Any:
    """Buffers that a program allocates become each thread's own."""
    own: dict[Any, Any] = {}

    def note(node: tirx.AllocBuffer) -> None:
        buffer = node.buffer
        if buffer.scope() not in ("local", "shared"):
            new = tirx.decl_buffer(buffer.shape, buffer.dtype, buffer.name, scope="local")
            own[buffer.__chandle__()] = new

    tvm_ffi.structural_walk(body, (tirx.AllocBuffer, note))
    if not own:
        return body
    return tvm_ffi.structural_map(
        body, (tirx.Var, lambda found: own.get(found.__chandle__(), found))
    )
