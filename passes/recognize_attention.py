"""Recognize attention from its parts, whatever way the heads were split off.

    softmax(scale Q K' + mask) V  =  MultiHeadAttention(Q, K, V)

Q, K and V are matrices for each head: ``(batch, heads, length, head size)``. The new node, of the
domain com.microsoft, reads them with the heads side by side, ``(batch, length, heads * head
size)``, which is how projections leave them; transpositions that lie between cancel in a later
pass. Attention without a dimension for heads counts as one head.

Exporters guard against rows that the mask hides completely: ``Where(IsNaN(p), 0, p)`` behind the
softmax. The guard moves behind the product with V, where such a row is not a number either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Dims, Editor, dims_of, number, same_dim
from hybridc.passes.pattern import Match, Pattern, Variable, either, match, operation

MICROSOFT = "com.microsoft"

HIDDEN = -1e30
"""A score at most this large counts as hidden: adding it to any other score leaves it alone."""

_ORDERS = {"query": (0, 2, 1, 3), "key": (0, 3, 1, 2), "value": (0, 2, 1, 3)}
_ORDERS_OF_ONE_HEAD = {"query": (0, 1, 2), "key": (0, 2, 1), "value": (0, 1, 2)}
"""How the operands' axes have to be moved so that the heads come last but one."""

_FACTORS = {"query scale": 1, "key scale": 1, "scale": 1, "query divisor": -1, "key divisor": -1,
            "divisor": -1}  # fmt: skip


class RecognizeAttention(ir.passes.InPlacePass):
    """Replaces written-out attention of the main graph, in float32."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace every product with V that fits."""
        editor = Editor(model.graph)
        for guarded in (True, False):
            pattern = _attention(guarded)
            for node in list(model.graph):
                if node.op_type != "MatMul" or node.domain or node.graph is None:
                    continue
                found = match(pattern, node.outputs[0])
                parts = None if found is None else _parts(found)
                if parts is not None:
                    _replace(editor, node, parts, guarded)
        return ir.passes.PassResult(model, editor.modified)


def _attention(guarded: bool) -> Pattern:
    query, key = (_scaled(Variable(name), name) for name in ("query", "key"))
    scores = _scaled(operation("MatMul", query, key), "")
    visible = Variable("visible", lambda value: value.dtype == ir.DataType.BOOL)
    hidden = Variable("hidden", _is_hidden)
    masked = either(
        operation("Add", scores, Variable("mask")),
        operation("Where", visible, scores, hidden),
        scores,
    )
    weights: Pattern = operation("Softmax", masked)
    if guarded:
        weights = operation("Where", operation("IsNaN", weights), 0, weights)
    return operation("MatMul", weights, Variable("value"))


def _is_hidden(value: ir.Value) -> bool:
    score = number(value)
    return score is not None and score <= HIDDEN


def _is_number(value: ir.Value) -> bool:
    return number(value) is not None


def _scaled(operand: Pattern, name: str) -> Pattern:
    """An operand that may be multiplied or divided by a number."""
    scale, divisor = (
        Variable(f"{name} {kind}".strip(), _is_number) for kind in ("scale", "divisor")
    )
    return either(operation("Mul", operand, scale), operation("Div", operand, divisor), operand)


@dataclass(frozen=True)
class _Parts:
    """Attention that fits.

    Attributes:
        found: Its values.
        scale: Factor of the scores.
        heads: Number of heads.
        shape: Dimensions of the scores, ``(batch, heads, queries, keys)``.
    """

    found: Match
    scale: float
    heads: int
    shape: Dims


def _parts(found: Match) -> _Parts | None:
    """What the node needs to know; ``None`` if shapes or types do not fit."""
    values = [found.values[name] for name in ("query", "key", "value")]
    if any(value.dtype != ir.DataType.FLOAT for value in values):
        return None
    query, key, value = (_with_heads(dims_of(value)) for value in values)
    ranks = {len(dims_of(value) or ()) for value in values}
    if query is None or key is None or value is None or len(ranks) > 1:
        return None
    fits = (
        all(isinstance(dim, int) and dim > 0 for dim in (query[1], query[3], value[3]))
        and all(same_dim(other[axis], query[axis]) for other in (key, value) for axis in (0, 1))
        and same_dim(key[2], query[3])
        and same_dim(key[3], value[2])
    )
    scale, heads = _scale(found), query[1]
    shape = (query[0], query[1], query[2], key[3])
    if not fits or scale == 0 or not isinstance(heads, int) or not _softmax_fits(found):
        return None
    mask = found.values.get("mask") or found.values.get("visible")
    if mask is not None and not _mask_fits(mask, shape, len(dims_of(values[0]) or ())):
        return None
    return _Parts(found, scale, heads, shape)


def _with_heads(dims: Dims | None) -> Dims | None:
    """Four dimensions; three are those of one head."""
    if dims is None or len(dims) not in (3, 4):
        return None
    return dims if len(dims) == 4 else (dims[0], 1, *dims[1:])


def _scale(found: Match) -> float:
    scale = 1.0
    for name, exponent in _FACTORS.items():
        if name in found.values:
            factor = number(found.values[name])
            if not factor or dims_of(found.values[name]) not in ((), (1,)):
                return 0.0
            scale *= factor**exponent
    return scale


def _softmax_fits(found: Match) -> bool:
    """Whether the softmax works along the last axis of scores."""
    (softmax,) = {node for node in found.inside if node.op_type == "Softmax"}
    rank = len(dims_of(softmax.outputs[0]) or ())
    axis = softmax.attributes.get_int("axis", -1 if softmax.inputs and rank else 0)
    explicit = "axis" in softmax.attributes
    graph = softmax.graph
    newer = isinstance(graph, ir.Graph) and graph.opset_imports.get("", 0) >= 13
    return rank > 0 and axis in (-1, rank - 1) and (explicit or newer)


def _mask_fits(mask: ir.Value, scores: Dims, rank: int) -> bool:
    """Whether a mask spreads over the scores without making them larger."""
    dims = dims_of(mask)
    if dims is None or len(dims) > rank:
        return False
    full = _mask_dims(dims, rank)
    spread = [dim == 1 and other != 1 for dim, other in zip(full, scores, strict=True)]
    fits = all(dim == 1 or same_dim(dim, other) for dim, other in zip(full, scores, strict=True))
    known = all(isinstance(dim, int) for dim in (*full[:2], *scores[2:]))
    return fits and (known or not any(spread[2:]))


def _mask_dims(dims: Dims, rank: int) -> Dims:
    """A mask's dimensions with ones for those in front and for the heads."""
    full = (*(1,) * (rank - len(dims)), *dims)
    return full if rank == 4 else (full[0], 1, *full[1:])


def _replace(editor: Editor, node: ir.Node, parts: _Parts, guarded: bool) -> None:
    values = parts.found.values
    rank = len(dims_of(values["query"]) or ())
    orders: Mapping[str, Sequence[int]] = _ORDERS if rank == 4 else _ORDERS_OF_ONE_HEAD
    operands = [_side_by_side(editor, node, values[n], order) for n, order in orders.items()]
    bias = _bias(editor, node, parts, rank)
    width = (dims_of(operands[2]) or ())[-1]
    editor.graph.opset_imports.setdefault(MICROSOFT, 1)
    result = editor.emit(
        node,
        "MultiHeadAttention",
        [*operands, None, None, bias] if bias is not None else operands,
        (parts.shape[0], parts.shape[2], width),
        {"num_heads": parts.heads, "scale": parts.scale},
        MICROSOFT,
    )
    if guarded:
        result = _guarded(editor, node, result)
    if rank == 4:
        assert isinstance(width, int)
        result = _apart(editor, node, result, parts.heads, width // parts.heads)
    editor.replace(node.outputs[0], result)


def _side_by_side(editor: Editor, node: ir.Node, value: ir.Value, order: Sequence[int]) -> ir.Value:
    """A value with its axes in another order and, if there are four, the last two joined."""
    dims = dims_of(value)
    assert dims is not None
    moved = [dims[axis] for axis in order]
    if list(order) != sorted(order):
        value = editor.emit(node, "Transpose", [value], moved, {"perm": list(order)})
    if len(order) == 3:
        return value
    heads, size = moved[2:]
    assert isinstance(heads, int)
    assert isinstance(size, int)
    return _reshape(editor, node, value, [0, 0, heads * size], [*moved[:2], heads * size])


def _reshape(
    editor: Editor, node: ir.Node, value: ir.Value, target: Sequence[int], dims: Dims
) -> ir.Value:
    """A Reshape; a zero in ``target`` keeps the dimension."""
    shape = editor.constant(np.array(target, np.int64), f"{node.outputs[0].name}__shape")
    return editor.emit(node, "Reshape", [value, shape], dims)


def _apart(editor: Editor, node: ir.Node, value: ir.Value, heads: int, size: int) -> ir.Value:
    """``(batch, length, heads * size)`` as ``(batch, heads, length, size)``."""
    batch, length, _ = dims_of(value) or ()
    split = _reshape(editor, node, value, [0, 0, heads, size], (batch, length, heads, size))
    dims = (batch, heads, length, size)
    return editor.emit(node, "Transpose", [split], dims, {"perm": [0, 2, 1, 3]})


def _bias(editor: Editor, node: ir.Node, parts: _Parts, rank: int) -> ir.Value | None:
    """The mask as a summand of the scores with a row for each query and a column for each key."""
    values = parts.found.values
    bias = values.get("mask")
    if "visible" in values:
        hidden = values["hidden"]
        zero = editor.constant(np.zeros((), np.float32), f"{hidden.name}__zero")
        visible = values["visible"]
        operands = [visible, zero, hidden]
        bias = editor.emit(node, "Where", operands, dims_of(visible), dtype=hidden.dtype)
    if bias is None:
        return None
    given = dims_of(bias) or ()
    dims = _mask_dims(given, rank)
    if len(given) != 4:
        sizes = [dim if isinstance(dim, int) else -1 for dim in dims]
        bias = _reshape(editor, node, bias, sizes, dims)
    wanted = (*dims[:2], *parts.shape[2:])
    if any(dim == 1 and other != 1 for dim, other in zip(dims, wanted, strict=True)):
        sizes = [dim if isinstance(dim, int) else 1 for dim in wanted]
        shape = editor.constant(np.array(sizes, np.int64), f"{bias.name}__shape")
        bias = editor.emit(node, "Expand", [bias, shape], wanted)
    return bias


def _guarded(editor: Editor, node: ir.Node, value: ir.Value) -> ir.Value:
    """Zero where a value is not a number."""
    dims = dims_of(value)
    zero = editor.constant(np.zeros((), np.float32), f"{node.outputs[0].name}__zero")
    wrong = editor.emit(node, "IsNaN", [value], dims, dtype=ir.DataType.BOOL)
    return editor.emit(node, "Where", [wrong, zero, value], dims, dtype=ir.DataType.FLOAT)
