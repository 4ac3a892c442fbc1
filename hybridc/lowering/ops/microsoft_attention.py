"""Attention of the domain com.microsoft, made of matrix products and a softmax.

    scores = scale * Q K' + bias + mask      (batch, heads, queries, keys)
    output = softmax(scores) V               heads side by side again in the last dimension

A key that the mask hides gets ``mask_filter_value`` added to its score, as in ONNX Runtime; a key
of the future in a causal layer gets the lowest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Converter, Unsupported, as_expression, shape_of
from hybridc.lowering.ops.common import (
    HALF_TYPES,
    Own,
    cast,
    compute,
    emit_kernel,
    map_elements,
    number,
    reshape,
    same_dim,
    simplify,
    value_shape,
)
from hybridc.lowering.ops.linear import product
from hybridc.lowering.ops.quantized import centered, combined, integer_product
from hybridc.lowering.value import Dim, Expression, Value


@dataclass(frozen=True)
class Heads:
    """Operands of attention, ``(batch, heads, length, head size)`` each.

    Attributes:
        query: Queries.
        key: Keys, those of the past included.
        value: Values, those of the past included.
    """

    query: Expression
    key: Expression
    value: Expression


def attention(call: Call) -> tuple[Value | None, ...]:
    """Self-attention that projects its input to queries, keys and values itself."""
    projected = product(call, call.tensor(0), call.tensor(1))
    if call.has(2):
        projected = _add(call, projected, call.value(2))
    return _self_attention(call, projected, mask=3, past=4, bias=5)


def quantized_attention(call: Call) -> tuple[Value | None, ...]:
    """The same with 8-bit input and weights: the projection is exact in int32."""
    zeros = [call.value(i) if call.has(i) else None for i in (6, 7)]
    sums = integer_product(
        call, centered(call, call.value(0), zeros[0]), centered(call, call.value(1), zeros[1])
    )
    scale = combined(call, "scale", lambda x, w: x * w, call.value(3), call.value(4))

    def element(x: Any, s: Any, b: Any) -> Any:
        return x.astype("float32") * s + b.astype("float32")

    projected = map_elements(call, element, sums, scale, call.value(2), name="projection")
    return _self_attention(call, projected, mask=5, past=8, bias=None)


def _self_attention(
    call: Call, projected: Expression, mask: int, past: int, bias: int | None
) -> tuple[Value | None, ...]:
    if call.attribute("do_rotary", 0) or call.attribute("past_present_share_buffer", 0):
        raise Unsupported("rotary embedding or a shared buffer inside Attention")
    if call.has(6) and past == 4:
        raise Unsupported("Attention with past_sequence_length")
    heads = int(call.attribute("num_heads"))
    width = shape_of(projected)[-1]
    if not isinstance(width, int):
        raise Unsupported("the hidden size must be known at compile time")
    sizes = call.attribute("qkv_hidden_sizes") or [width // 3] * 3
    ends = [0, *np.cumsum(sizes).tolist()]
    pieces = [
        _split_heads(call, _columns(call, projected, start, end), heads)
        for start, end in pairwise(ends)
    ]
    present = None
    if call.has(past):
        stored = call.tensor(past)
        pieces[1:] = [
            _concat(call, [_part(call, stored, index), piece], 2)
            for index, piece in enumerate(pieces[1:])
        ]
    if len(call.node.outputs) > 1 and call.node.outputs[1].name:
        rows = [call.emit(relax.op.expand_dims(piece, 0)) for piece in pieces[1:]]
        present = _concat(call, rows, 0)
    extra = call.value(bias) if bias is not None and call.has(bias) else None
    result = attend(call, Heads(*pieces), call.value(mask) if call.has(mask) else None, extra)
    return result, present


def multi_head_attention(call: Call) -> tuple[Value | None, ...]:
    """Attention over projected queries, keys and values, with optional past keys and values."""
    heads = int(call.attribute("num_heads"))
    if any(call.has(index) for index in (8, 9)) or call.rank(0) != 3 or not call.has(1):
        raise Unsupported("MultiHeadAttention with packed inputs or a shared buffer")
    if len(call.node.outputs) > 3 and call.node.outputs[3].name:
        raise Unsupported("the scores as a result")
    pieces, offset = [], 0
    for index in range(3):
        value = call.tensor(index)
        if call.rank(index) == 4:
            pieces.append(value)
            continue
        width = call.shape(index)[-1]
        if call.has(3):
            value = _add(call, value, _columns(call, call.tensor(3), offset, offset + width))
        offset = offset + width
        pieces.append(_split_heads(call, value, heads))
    if call.has(6):
        pieces[1:] = [
            _concat(call, [call.tensor(past), piece], 2)
            for past, piece in zip((6, 7), pieces[1:], strict=True)
        ]
    mask = call.value(4) if call.has(4) else None
    extra = call.value(5) if call.has(5) else None
    return attend(call, Heads(*pieces), mask, extra), pieces[1], pieces[2]


def attend(call: Call, heads: Heads, mask: Value | None, extra: Value | None) -> Expression:
    """``softmax(scale Q K' + extra + mask) V`` with the heads merged: ``(batch, length, hidden)``.

    The attributes ``scale``, ``unidirectional`` and ``mask_filter_value`` are read from the node.
    """
    head = shape_of(heads.query)[3]
    dtype = str(heads.query.ty.dtype)
    scale = float(call.attribute("scale", 0.0)) or 1.0 / float(np.sqrt(head))
    transposed = call.emit(relax.op.permute_dims(heads.key, [0, 1, 3, 2]))
    work = "float32" if dtype in HALF_TYPES else dtype
    scores = call.emit(relax.op.matmul(heads.query, transposed, out_dtype=work))
    scores = _masked(call, scores, scale, mask, extra)
    weights = cast(call, call.emit(relax.op.nn.softmax(scores, axis=-1)), dtype)
    result = product(call, weights, heads.value)
    batch, count, length, size = shape_of(result)
    merged = call.emit(relax.op.permute_dims(result, [0, 2, 1, 3]))
    return reshape(call, merged, (batch, length, simplify(count * size)))


def _masked(
    call: Call, scores: Expression, scale: float, mask: Value | None, extra: Value | None
) -> Expression:
    """Scores times ``scale`` plus the bias, with hidden keys pushed away."""
    shape = shape_of(scores)
    past = simplify(shape[3] - shape[2])
    causal = bool(call.attribute("unidirectional", 0))
    hidden = tirx.const(float(call.attribute("mask_filter_value", -10000.0)), "float32")
    names = [name for name, value in (("extra", extra), ("mask", mask)) if value is not None]
    operands = [call.materialize(v) for v in (extra, mask) if v is not None]
    rule = None if mask is None else _mask_rule(value_shape(call, mask), shape)

    def kernel(own: Own, data: te.Tensor, *arrays: te.Tensor) -> te.Tensor:
        given = dict(zip(names, arrays, strict=True))

        def element(b: Any, n: Any, s: Any, t: Any) -> Any:
            score = data(b, n, s, t) * number(scale, data)
            if "extra" in given:
                table = given["extra"]
                row = b if not same_dim(shape_of_tensor(table)[0], 1) else 0
                column = n if not same_dim(shape_of_tensor(table)[1], 1) else 0
                score = score + table(row, column, s, t).astype(element_type_of(data))
            if rule is not None:
                visible = rule(given["mask"], b, s, t, own(shape[0]))
                zero = tirx.const(0, "float32")
                score = score + tirx.Select(visible, zero, hidden).astype(element_type_of(data))
            if causal:
                lowest = tirx.min_value(element_type_of(data))
                score = tirx.Select(t > s + own(as_expression(past)), lowest, score)
            return score

        return compute(map(own, shape), element, "scores")

    return emit_kernel(call, kernel, scores, *operands, name="scores")


def shape_of_tensor(tensor: te.Tensor) -> list[Dim]:
    """Dimensions of a ``te`` tensor, ints where known."""
    return [simplify(dim) for dim in tensor.shape]


def element_type_of(tensor: te.Tensor) -> str:
    """numpy's name of a ``te`` tensor's element type."""
    return str(tensor.dtype)


def _mask_rule(given: Sequence[Dim], scores: Sequence[Dim]) -> Any:
    """Whether key ``t`` is visible to query ``s`` of batch row ``b``, from a mask's shape.

    A vector holds the number of keys of each row, or that and then the first key of each row; a
    matrix a flag for each key; a cube a flag for each query and key.
    """
    batch = scores[0]
    if len(given) == 1 and same_dim(given[0], batch):
        return lambda mask, b, s, t, rows: t < mask(b).astype("int64")
    if len(given) == 1 and same_dim(given[0], simplify(batch * 2)):
        return lambda mask, b, s, t, rows: tirx.all(
            t < mask(b).astype("int64"), t >= mask(b + rows).astype("int64")
        )
    if len(given) == 2 and same_dim(given[1], scores[3]):
        return lambda mask, b, s, t, rows: mask(b, t) > number(0, mask)
    if len(given) == 3 and same_dim(given[1], scores[2]) and same_dim(given[2], scores[3]):
        return lambda mask, b, s, t, rows: mask(b, s, t) > number(0, mask)
    raise Unsupported(f"an attention mask of shape {tuple(given)}")


def _add(call: Call, left: Value, right: Value) -> Expression:
    return map_elements(call, lambda x, y: x + y, left, right, name="add")


def _columns(call: Call, tensor: Expression, start: Dim, end: Dim) -> Expression:
    """Part of the last dimension."""
    axis = len(shape_of(tensor)) - 1
    if not isinstance(start, int) or not isinstance(end, int):
        raise Unsupported("the hidden size must be known at compile time")
    return call.emit(relax.op.strided_slice(tensor, [axis], [start], [end]))


def _part(call: Call, tensor: Expression, index: int) -> Expression:
    piece = call.emit(relax.op.strided_slice(tensor, [0], [index], [index + 1]))
    return call.emit(relax.op.squeeze(piece, 0))


def _concat(call: Call, pieces: Sequence[Expression], axis: int) -> Expression:
    return call.emit(relax.op.concat(list(pieces), axis))


def _split_heads(call: Call, tensor: Expression, heads: int) -> Expression:
    """``(batch, length, hidden)`` as ``(batch, heads, length, head size)``."""
    batch, length, width = shape_of(tensor)
    if not isinstance(width, int) or width % heads:
        raise Unsupported(f"{width} columns for {heads} heads")
    split = reshape(call, tensor, (batch, length, heads, width // heads))
    return call.emit(relax.op.permute_dims(split, [0, 2, 1, 3]))


ROWS: dict[str, Converter] = {
    "Attention": attention,
    "MultiHeadAttention": multi_head_attention,
    "QAttention": quantized_attention,
}
