"""Tensors between the loop nests of a kernel are kept whole where TVM would cut them wrongly.

    for a: between[a] = ...                  nest 1
    for b: out[b] = between[index(b)]        nest 2

TVM 0.27 allocates no more of ``between`` than it finds to be read. Where the index has a ``Select``
whose sides are remainders of ``b``, what it finds depends on ``b``, which is not defined yet where
the tensor is allocated. Nothing is saved by a bound there: both nests are complete. So a block that
reads by other than sums, products and quotients says that it reads the whole tensor.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from hybridc.targets.llvm.schedules.blocks import changed, collect, loads_of, used_buffers
from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize

EXPLICIT = "explicit_read_region"
"""Annotation of a block with the numbers of those reads that TVM takes as they are declared."""

_AFFINE = (tirx.Var, tirx.IntImm, tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod)


def whole_regions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The scheduled function in which tensors between its nests stay whole where it matters."""
    if not isinstance(function.body, SBlockRealize):
        return function
    buffers = _between_nests(function.body.block)
    if not buffers:
        return function
    body = tvm_ffi.structural_map(function.body, (SBlock, lambda block: _reads(block, buffers)))
    return function.with_body(body)


def _between_nests(root: SBlock) -> list[Any]:
    """Buffers of a function that several of its outermost loops use."""
    if not root.alloc_buffers or not isinstance(root.body, tirx.SeqStmt):
        return []
    used = [used_buffers(nest) for nest in root.body.seq]
    return [buffer for buffer in root.alloc_buffers if sum(buffer in own for own in used) > 1]


def _reads(block: SBlock, buffers: list[Any]) -> SBlock:
    """A block that reads buffers as a whole if an index of its is not affine."""
    odd = {
        load.source
        for load in loads_of(block)
        if load.source in buffers and not all(map(_is_affine, load.indices))
    }
    if not odd or not block.iter_vars:
        return block
    reads = [_whole(read.source) if read.source in odd else read for read in block.reads]
    numbers = [number for number, read in enumerate(reads) if read.source in odd]
    return changed(block, reads=reads, annotations={**block.annotations, EXPLICIT: numbers})


def _is_affine(index: Any) -> bool:
    return all(isinstance(node, _AFFINE) for node in collect(index, tvm.ir.Expr))


def _whole(buffer: Any) -> tirx.BufferRegion:
    return tirx.BufferRegion(buffer, [tvm.ir.Range(0, size) for size in buffer.shape])
