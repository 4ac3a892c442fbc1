"""How operators behave when the axes of what they read and write are permuted.

A permutation ``p`` of a value means that it is stored as ``Transpose(value, perm=p)``. A rule says
which permutations of a node's other values follow from that of one of them, and builds the node
that works on the permuted values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import (
    Array,
    Dims,
    Editor,
    contents,
    dims_of,
    integers,
    reduced_axes,
    same_dim,
    static_shape,
)

Permutation: TypeAlias = tuple[int, ...]
Layouts: TypeAlias = Mapping[ir.Value, Permutation]

_ELEMENTWISE = frozenset(
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr "
    "BitwiseXor Cast Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater "
    "GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log Max "
    "Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin "
    "Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor".split()
)
_MICROSOFT_ELEMENTWISE = frozenset(("FastGelu", "Gelu", "QuickGelu"))
_ONE_AXIS = frozenset(("Concat", "Split"))
_SOFTMAX = frozenset(("Softmax", "LogSoftmax", "Hardmax"))
_RESHAPES = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten"))


def identity(rank: int) -> Permutation:
    """The permutation that moves nothing."""
    return tuple(range(rank))


def inverse(permutation: Permutation) -> Permutation:
    """The permutation that takes back another one."""
    return tuple(permutation.index(axis) for axis in range(len(permutation)))


def compose(first: Permutation, second: Permutation) -> Permutation:
    """One transposition for two, ``first`` before ``second``."""
    return tuple(first[axis] for axis in second)


def permuted(dims: Dims, permutation: Permutation) -> tuple[int | ir.SymbolicDim, ...]:
    """Dimensions after a transposition."""
    return tuple(dims[axis] for axis in permutation)


def moves_data(dims: Dims, permutation: Permutation) -> bool:
    """Whether a transposition changes the order of elements: not if only ones are moved."""
    order = [axis for axis in permutation if dims[axis] != 1]
    return order != sorted(order)


@dataclass(frozen=True)
class Rule:
    """What is known about a kind of operator.

    Attributes:
        spread: Permutations of a node's values, given one of the values with its own; ``None`` if
            the node cannot work on permuted values. Values not mentioned stay as they are.
        build: The attributes and inputs of the node on permuted values, given the editor, the
            node, the permutations, and the permuted values in place of its inputs.
    """

    spread: Callable[[ir.Node, ir.Value, Permutation], Layouts | None]
    build: Callable[[Editor, ir.Node, Layouts, list[ir.Value | None]], ir.Node]


def rule_for(node: ir.Node, opset: int) -> Rule | None:
    """The rule for a node; ``None`` if its axes have fixed meanings."""
    if node.domain:
        known = node.domain == "com.microsoft" and node.op_type in _MICROSOFT_ELEMENTWISE
        return _SAME if known and len(node.inputs) == 1 else None
    if node.op_type in _ELEMENTWISE or _is_per_tensor(node):
        return _SAME
    if node.op_type in _ONE_AXIS or (node.op_type in _SOFTMAX and opset >= 13):
        return _ALONG_AXIS
    if node.op_type.startswith("Reduce"):
        return _REDUCE
    if node.op_type in _RESHAPES:
        return _UNIT_RESHAPE
    return {"Slice": _SLICE, "Pad": _PAD, "Resize": _RESIZE, "DepthToSpace": _DEPTH_TO_SPACE}.get(
        node.op_type
    )


def _is_per_tensor(node: ir.Node) -> bool:
    """Whether a node quantizes or dequantizes a whole tensor with one constant scale."""
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
        return False
    parameters = [contents(value) for value in node.inputs[1:] if value is not None]
    return all(array is not None and array.size == 1 for array in parameters)


def _same_everywhere(node: ir.Node, value: ir.Value, perm: Permutation) -> Layouts | None:
    """All values of full rank are permuted alike; constants follow, scalars have no axes."""
    result = {}
    for other in (*node.inputs, *node.outputs):
        if other is None or not other.name or _is_constant(other):
            continue
        dims = dims_of(other)
        if dims is None or len(dims) not in (0, len(perm)):
            return None
        if dims:
            result[other] = perm
    # Of two operands one may have a smaller rank only if it is a constant.
    outputs = [dims_of(output) for output in node.outputs if output.name]
    whole = all(dims is not None and len(dims) == len(perm) for dims in outputs)
    return result if whole and value in result else None


def _is_constant(value: ir.Value) -> bool:
    return value.const_value is not None and not value.is_graph_input()


def _only_data(node: ir.Node, _value: ir.Value, perm: Permutation) -> Layouts | None:
    """The first input and the outputs are permuted alike; further inputs are parameters."""
    source = node.inputs[0]
    if source is None or _is_constant(source):
        return None
    values = [source, *(output for output in node.outputs if output.name)]
    if any((dims := dims_of(value)) is None or len(dims) != len(perm) for value in values):
        return None
    return dict.fromkeys(values, perm)


def _copy(
    node: ir.Node,
    layouts: Layouts,
    inputs: Sequence[ir.Value | None],
    editor: Editor,
    attributes: Mapping[str, ir.Attr] | None = None,
    operator: str = "",
) -> ir.Node:
    """A node like another one, with outputs of its own in permuted shapes."""
    outputs = []
    for old in node.outputs:
        dims = dims_of(old)
        perm = layouts.get(old)
        shape = dims if dims is None or perm is None else permuted(dims, perm)
        name = editor.free_name(f"{old.name}__permuted") if old.name else ""
        outputs.append(
            ir.Value(name=name, type=old.type, shape=None if shape is None else ir.Shape(shape))
        )
    kept = node.attributes.values() if attributes is None else attributes.values()
    return ir.Node(
        node.domain, operator or node.op_type, inputs, list(kept), outputs=outputs, name=node.name
    )


def _with(node: ir.Node, name: str, value: object) -> dict[str, ir.Attr]:
    """A node's attributes with one changed."""
    return {**node.attributes, name: ir.convenience.convert_attribute(name, value)}


def _build_elementwise(
    editor: Editor, node: ir.Node, layouts: Layouts, inputs: list[ir.Value | None]
) -> ir.Node:
    perm = next(iter(layouts.values()))
    moved = [
        _permuted_constant(editor, value, perm) if value is not None else None for value in inputs
    ]
    return _copy(node, layouts, moved, editor)


def _permuted_constant(editor: Editor, value: ir.Value, perm: Permutation) -> ir.Value:
    array = contents(value)
    if array is None or array.size == 1:
        return value
    full = array.reshape((1,) * (len(perm) - array.ndim) + array.shape)
    return editor.constant(full.transpose(perm), f"{value.name}__permuted")


def _axis_of(node: ir.Node) -> int:
    default = {"Concat": 1, "Split": 0}.get(node.op_type, -1)
    return node.attributes.get_int("axis", default)


def _build_along_axis(
    editor: Editor, node: ir.Node, layouts: Layouts, inputs: list[ir.Value | None]
) -> ir.Node:
    perm = next(iter(layouts.values()))
    axis = perm.index(_axis_of(node) % len(perm))
    if node.op_type == "Concat":
        inputs = [
            _permuted_constant(editor, value, perm) if value is not None else None
            for value in inputs
        ]
    return _copy(node, layouts, inputs, editor, _with(node, "axis", axis))


def _spread_along_axis(node: ir.Node, value: ir.Value, perm: Permutation) -> Layouts | None:
    if node.op_type != "Concat":
        return _only_data(node, value, perm)
    return _same_everywhere(node, value, perm)


# Reductions


def _spread_reduction(node: ir.Node, value: ir.Value, perm: Permutation) -> Layouts | None:
    source, result = node.inputs[0], node.outputs[0]
    if source is None or _is_constant(source):
        return None
    axes, dims = reduced_axes(node), dims_of(source)
    if axes is None or dims is None:
        return None
    if node.attributes.get_int("keepdims", 1):
        return {source: perm, result: perm}
    kept = [axis for axis in range(len(dims)) if axis not in axes]
    if value is source:
        order = tuple(kept.index(axis) for axis in perm if axis in kept)
        return {source: perm, result: order}
    return {source: _filled(len(dims), kept, [kept[axis] for axis in perm]), result: perm}


def _filled(rank: int, places: Sequence[int], axes: Sequence[int]) -> Permutation:
    """A permutation that puts ``axes`` at ``places`` and leaves all others where they are."""
    result = list(range(rank))
    for place, axis in zip(places, axes, strict=True):
        result[place] = axis
    return tuple(result)


def _build_reduction(
    editor: Editor, node: ir.Node, layouts: Layouts, inputs: list[ir.Value | None]
) -> ir.Node:
    source = node.inputs[0]
    axes = reduced_axes(node)
    assert source is not None
    assert axes is not None
    perm = layouts.get(source) or identity(len(dims_of(source) or ()))
    moved = sorted(perm.index(axis) for axis in axes)
    if "axes" in node.attributes:
        return _copy(node, layouts, inputs, editor, _with(node, "axes", moved))
    if len(inputs) > 1 and inputs[1] is not None and moved:
        inputs[1] = editor.constant(np.array(moved, np.int64), f"{node.outputs[0].name}__axes")
    return _copy(node, layouts, inputs, editor)


# Reshapes that only add and remove ones


def _spread_unit_reshape(node: ir.Node, value: ir.Value, perm: Permutation) -> Layouts | None:
    source, result = node.inputs[0], node.outputs[0]
    if source is None or _is_constant(source):
        return None
    before, after = dims_of(source), dims_of(result)
    if before is None or after is None:
        return None
    left, right = _long_axes(before), _long_axes(after)
    if len(left) != len(right) or not all(
        same_dim(before[i], after[j]) for i, j in zip(left, right, strict=True)
    ):
        return None
    unknown = [dim for dim in after if not isinstance(dim, int)]
    if len(unknown) > 1 or 0 in after:
        return None
    if value is source:
        order = [right[left.index(axis)] for axis in perm if axis in left]
        return {source: perm, result: _filled(len(after), right, order)}
    order = [left[right.index(axis)] for axis in perm if axis in right]
    return {source: _filled(len(before), left, order), result: perm}


def _long_axes(dims: Dims) -> list[int]:
    return [axis for axis, dim in enumerate(dims) if dim != 1]


def _build_reshape(
    editor: Editor, node: ir.Node, layouts: Layouts, inputs: list[ir.Value | None]
) -> ir.Node:
    result = node.outputs[0]
    dims = dims_of(result)
    assert dims is not None
    target = permuted(dims, layouts.get(result) or identity(len(dims)))
    sizes = [dim if isinstance(dim, int) else -1 for dim in target]
    shape = editor.constant(np.array(sizes, np.int64), f"{result.name}__shape")
    return _copy(node, layouts, [inputs[0], shape], editor, {}, "Reshape")


# Slice and Pad


def _spread_slice(node: ir.Node, value: ir.Value, perm: Permutation) -> Layouts | None:
    return None if _slice_axes(node) is None else _only_data(node, value, perm)


def _slice_axes(node: ir.Node) -> list[int] | None:
    """Axes of a Slice, as they stand or by default; ``None`` if they are not known."""
    if "starts" in node.attributes:
        axes = node.attributes.get("axes")
        return list(range(len(node.attributes["starts"].value))) if axes is None else [*axes.value]
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return integers(node.inputs[3])
    starts = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if starts is None else list(range(len(starts)))


def _build_slice(
    editor: Editor, node: ir.Node, layouts: Layouts, inputs: list[ir.Value | None]
) -> ir.Node:
    perm, axes = next(iter(layouts.values())), _slice_axes(node)
    assert axes is not None
    moved = [perm.index(axis % len(perm)) for axis in axes]
    if "starts" in node.attributes:
        return _copy(node, layouts, inputs, editor, _with(node, "axes", moved))
    constant = editor.constant(np.array(moved, np.int64), f"{node.outputs[0].name}__axes")
    padded = [*inputs, None] if len(inputs) == 3 else inputs
    return _copy(node, layouts, [*padded[:3], constant, *padded[4:]], editor)


def _spread_pad(node: ir.Node, value: ir.Value, perm: Permutation) -> Layouts | None:
    given = node.inputs[1] if len(node.inputs) > 1 else None
    known = "pads" in node.attributes or integers(given) is not None
    plain = len(node.inputs) < 4 or node.inputs[3] is None
    return _only_data(node, value, perm) if known and plain else None


def _build_pad(
    editor: Editor, node: ir.Node, layouts: Layouts, inputs: list[ir.Value | None]
) -> ir.Node:
    perm = next(iter(layouts.values()))
    if "pads" in node.attributes:
        pads = _moved_pads(np.array(node.attributes["pads"].value), perm)
        return _copy(node, layouts, inputs, editor, _with(node, "pads", pads.tolist()))
    array = contents(node.inputs[1])
    assert array is not None
    constant = editor.constant(_moved_pads(array, perm), f"{node.outputs[0].name}__pads")
    return _copy(node, layouts, [inputs[0], constant, *inputs[2:]], editor)


def _moved_pads(pads: Array, perm: Permutation) -> Array:
    moved: Array = pads.reshape(2, -1)[:, list(perm)].ravel()
    return moved


# Resize


def _spread_resize(node: ir.Node, value: ir.Value, perm: Permutation) -> Layouts | None:
    plain = "axes" not in node.attributes and len(node.inputs) > 2
    given = [v for v in node.inputs[1:] if v is not None]
    known = all(contents(parameter) is not None for parameter in given)
    return _only_data(node, value, perm) if plain and known else None


def _build_resize(
    editor: Editor, node: ir.Node, layouts: Layouts, inputs: list[ir.Value | None]
) -> ir.Node:
    perm = next(iter(layouts.values()))
    moved = [inputs[0], *(_moved_parameter(editor, value, perm) for value in inputs[1:])]
    return _copy(node, layouts, moved, editor)


def _moved_parameter(editor: Editor, value: ir.Value | None, perm: Permutation) -> ir.Value | None:
    """A region (twice as long as there are axes), scales or sizes of Resize."""
    array = contents(value)
    if value is None or array is None or not array.size:
        return value
    moved = array.reshape(-1, len(perm))[:, list(perm)].ravel()
    return editor.constant(moved, f"{value.name}__permuted")


# DepthToSpace: channels last, it swaps the columns and the rows of blocks


def _spread_depth(node: ir.Node, value: ir.Value, perm: Permutation) -> Layouts | None:
    usual = node.attributes.get_string("mode", "DCR") == "DCR" and perm == (0, 2, 3, 1)
    known = static_shape(node.inputs[0]) is not None and static_shape(node.outputs[0]) is not None
    return _only_data(node, value, perm) if usual and known else None


def _build_depth(
    editor: Editor, node: ir.Node, _layouts: Layouts, inputs: list[ir.Value | None]
) -> ir.Node:
    dims, result = static_shape(node.inputs[0]), static_shape(node.outputs[0])
    assert dims is not None
    assert result is not None
    block = node.attributes.get_int("blocksize", 0)
    batch, _, rows, columns = dims
    run = block * result[1]
    split = _reshaped(editor, node, inputs[0], [batch, rows, columns, block, run])
    swapped = editor.emit(
        node, "Transpose", [split], [batch, rows, block, columns, run], {"perm": [0, 1, 3, 2, 4]}
    )
    target = permuted(result, (0, 2, 3, 1))
    shape = editor.constant(np.array(target, np.int64), f"{node.outputs[0].name}__shape")
    return _copy(node, {node.outputs[0]: (0, 2, 3, 1)}, [swapped, shape], editor, {}, "Reshape")


def _reshaped(
    editor: Editor, node: ir.Node, value: ir.Value | None, dims: Sequence[int]
) -> ir.Value:
    shape = editor.constant(np.array(dims, np.int64), f"{node.outputs[0].name}__split")
    return editor.emit(node, "Reshape", [value, shape], dims)


_SAME = Rule(_same_everywhere, _build_elementwise)
_ALONG_AXIS = Rule(_spread_along_axis, _build_along_axis)
_REDUCE = Rule(_spread_reduction, _build_reduction)
_UNIT_RESHAPE = Rule(_spread_unit_reshape, _build_reshape)
_SLICE = Rule(_spread_slice, _build_slice)
_PAD = Rule(_spread_pad, _build_pad)
_RESIZE = Rule(_spread_resize, _build_resize)
_DEPTH_TO_SPACE = Rule(_spread_depth, _build_depth)
