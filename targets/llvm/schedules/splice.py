"""Replace one computation of a function by tensor expressions that compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from hybridc.targets.fitting import Misfit
from hybridc.targets.llvm.schedules.blocks import changed, collect, used_buffers
from tvm import te, tirx
from tvm.s_tir import SBlock, SBlockRealize


def replace_block(
    function: tirx.PrimFunc,
    name: str,
    tensors: Sequence[te.Tensor],
    buffers: Sequence[Any],
) -> tirx.PrimFunc:
    """Replace the loop nest of block ``name`` by a tensor-expression program.

    Args:
        function: A function whose root block holds a sequence of loop nests.
        name: Name of the block to replace.
        tensors: Placeholders and, last, the result of the program.
        buffers: The function's buffer for each of ``tensors``.

    Raises:
        Misfit: The function has another form.
    """
    program = te.create_prim_func(list(tensors))
    renamed = dict(zip(program.params, buffers, strict=True))
    inner = program.body.block
    body = tvm_ffi.structural_map(
        inner.body, (tirx.Var, lambda variable: renamed.get(variable, variable))
    )
    nests = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    return replace_nest(function, name, nests, inner.alloc_buffers)


def replace_nest(
    function: tirx.PrimFunc, name: str, nests: Sequence[Any], buffers: Sequence[Any]
) -> tirx.PrimFunc:
    """Replace the loop nest of block ``name`` by other nests.

    Args:
        function: A function whose root block holds a sequence of loop nests.
        name: Name of the block to replace.
        nests: Statements to put in its place.
        buffers: Buffers that they need allocated.

    Raises:
        Misfit: The block shares its loop nest with others.
    """
    root = function.body.block
    parts = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    chosen = [i for i, part in enumerate(parts) if _holds(part, name)]
    if len(chosen) != 1 or len(collect(parts[chosen[0]], SBlock)) != 1:
        raise Misfit(f"no loop nest of its own for {name}")
    parts[chosen[0] : chosen[0] + 1] = nests
    body = tirx.SeqStmt(parts) if len(parts) > 1 else parts[0]
    return _with_root(function, body, [*root.alloc_buffers, *buffers])


def without_unused_buffers(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function without those intermediate buffers that nothing reads or writes."""
    root = function.body.block
    used = used_buffers(root.body)
    kept = [buffer for buffer in root.alloc_buffers if buffer in used]
    return _with_root(function, root.body, kept)


def _with_root(function: tirx.PrimFunc, body: Any, buffers: Sequence[Any]) -> tirx.PrimFunc:
    """The function with another body and other buffers in its root block."""
    root = function.body.block
    new_root = changed(root, body=body, alloc_buffers=buffers)
    return function.with_body(SBlockRealize([], True, new_root))


def _holds(statement: Any, name: str) -> bool:
    return any(block.name_hint == name for block in collect(statement, SBlock))
