"""Remove work that moves data for nothing.

    Reshape, Squeeze, Unsqueeze, Flatten    one after another become one Reshape, or none
    Identity, Dropout, Cast, Slice, Expand, Tile, Pad, Concat, Split, Sum, Mul by one, ...
                                            that do nothing go
    Concat(Split(x)), Split(Concat(a, b))   become what they started from
    Gather of neighbors                     becomes a Slice
    Reshape(Reduce(x))                      that puts the reduced axes back becomes ``keepdims``

A rule is given a node and returns the value to read in place of its first output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import (
    Editor,
    contents,
    dims_of,
    integers,
    number,
    only_reader,
    reduced_axes,
    same_shape,
    static_shape,
)

Rule = Callable[[Editor, ir.Node], "ir.Value | None"]

_RESHAPES = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten"))
_BROADCAST = 7
"""Opset from which Add broadcasts as in numpy."""

_SLICE_INPUTS = 10
"""Opset from which Slice takes its bounds as inputs."""


class CleanMovement(ir.passes.InPlacePass):
    """Applies the rules to the main graph until none applies."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Clean up; every rule leaves fewer or cheaper nodes, so this ends."""
        editor = Editor(model.graph)
        changed = True
        while changed:
            changed = False
            for node in list(model.graph):
                changed |= _apply(editor, node)
        return ir.passes.PassResult(model, editor.modified)


def _apply(editor: Editor, node: ir.Node) -> bool:
    """Apply the first rule that fits a node."""
    if node.domain or node.graph is None or not node.inputs or node.inputs[0] is None:
        return False
    for rule in _RULES.get(node.op_type, ()):
        value = rule(editor, node)
        if value is not None and not _would_copy(node.outputs[0], value):
            editor.replace(node.outputs[0], value)
            return True
    return False


def _would_copy(old: ir.Value, new: ir.Value) -> bool:
    """Whether the node would only be replaced by an Identity: an output that is an input, too."""
    return old.is_graph_output() and (new.producer() is None or new.is_graph_output())


def _given(_editor: Editor, node: ir.Node) -> ir.Value | None:
    return node.inputs[0]


def _dropout(_editor: Editor, node: ir.Node) -> ir.Value | None:
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    masked = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    training = mode is not None and number(mode) != 0
    return None if masked or training else node.inputs[0]


def _cast(_editor: Editor, node: ir.Node) -> ir.Value | None:
    source = node.inputs[0]
    assert source is not None
    to = node.attributes.get_int("to", -1)
    return source if source.dtype is not None and source.dtype == to else None


def _same_shape(_editor: Editor, node: ir.Node) -> ir.Value | None:
    """An operator that does nothing where it leaves the shape alone."""
    return node.inputs[0] if same_shape(node.inputs[0], node.outputs[0]) else None


def _static_same_shape(_editor: Editor, node: ir.Node) -> ir.Value | None:
    shape = static_shape(node.inputs[0])
    return node.inputs[0] if shape is not None and shape == static_shape(node.outputs[0]) else None


def _pad(_editor: Editor, node: ir.Node) -> ir.Value | None:
    given = node.attributes.get("pads")
    pads = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    pads = list(given.value) if given is not None else pads
    return node.inputs[0] if pads is not None and not any(pads) else None


def _alone(_editor: Editor, node: ir.Node) -> ir.Value | None:
    """An operator of any number of inputs that does nothing with one."""
    return node.inputs[0] if len(node.inputs) == 1 else None


def _sum(editor: Editor, node: ir.Node) -> ir.Value | None:
    """A sum as additions, from the left."""
    numpy_rule = editor.graph.opset_imports.get("", 0) >= _BROADCAST
    if len(node.inputs) < 2 or None in node.inputs or not numpy_rule:
        return None
    total = node.inputs[0]
    for index, term in enumerate(node.inputs[1:], 2):
        shape = dims_of(node.outputs[0]) if index == len(node.inputs) else _broadcast(total, term)
        if shape is None:
            return None
        total = editor.emit(node, "Add", [total, term], shape)
    return total


def _broadcast(left: ir.Value | None, right: ir.Value | None) -> tuple[int, ...] | None:
    first, second = static_shape(left), static_shape(right)
    if first is None or second is None:
        return None
    return tuple(np.broadcast_shapes(first, second))


def _times_one(_editor: Editor, node: ir.Node) -> ir.Value | None:
    for index in (0, 1) if node.op_type == "Mul" else (0,):
        kept, other = node.inputs[index], node.inputs[1 - index]
        if number(other) == 1 and same_shape(kept, node.outputs[0]):
            return kept
    return None


def _bound_without_effect(_editor: Editor, node: ir.Node) -> ir.Value | None:
    """The maximum of a value and minus infinity, or the minimum of it and infinity."""
    idle = -np.inf if node.op_type == "Max" else np.inf
    if len(node.inputs) == 1:
        return node.inputs[0]
    if len(node.inputs) != 2:
        return None
    for kept, other in (node.inputs, node.inputs[::-1]):
        if number(other) == idle and same_shape(kept, node.outputs[0]):
            return kept
    return None


# Reshapes


def _reshape_target(value: ir.Value) -> list[int] | None:
    """What a Reshape has to be given to arrive at the shape of ``value``, if that can be said."""
    dims = dims_of(value)
    if dims is None:
        return None
    sizes = [dim if isinstance(dim, int) else -1 for dim in dims]
    return None if 0 in sizes or sizes.count(-1) > 1 else sizes


def reshaped(editor: Editor, node: ir.Node, source: ir.Value, like: ir.Value) -> ir.Value | None:
    """``source`` in the shape of ``like``, in front of a node; ``None`` if it cannot be said."""
    sizes = _reshape_target(like)
    if sizes is None:
        return None
    target = editor.constant(np.array(sizes, np.int64), f"{like.name}__shape")
    return editor.emit(node, "Reshape", [source, target], dims_of(like))


def _merge_reshapes(editor: Editor, node: ir.Node) -> ir.Value | None:
    source = node.inputs[0]
    before = None if source is None else source.producer()
    if before is None or before.domain or before.op_type not in _RESHAPES:
        return None
    origin = before.inputs[0]
    if origin is None or before.graph is not node.graph:
        return None
    if same_shape(origin, node.outputs[0]):
        return origin
    return reshaped(editor, node, origin, node.outputs[0])


def _keep_reduced(editor: Editor, node: ir.Node) -> ir.Value | None:
    """A reduction with ``keepdims`` for one whose reduced axes are put back as ones."""
    source = node.inputs[0]
    reduction = None if source is None else source.producer()
    if reduction is None or source is None or only_reader(source) is not node:
        return None
    reduces = reduction.op_type.startswith("Reduce") and not reduction.domain
    kept = reduction.attributes.get_int("keepdims", 1) == 1
    if not reduces or kept or reduction.graph is None:
        return None
    axes, dims = reduced_axes(reduction), static_shape(reduction.inputs[0])
    if axes is None or dims is None:
        return None
    whole = tuple(1 if axis in axes else dim for axis, dim in enumerate(dims))
    if static_shape(node.outputs[0]) != whole:
        return None
    attributes = {name: a.value for name, a in reduction.attributes.items()} | {"keepdims": 1}
    return editor.emit(node, reduction.op_type, list(reduction.inputs), whole, attributes)


# Slices


def _whole_slice(_editor: Editor, node: ir.Node) -> ir.Value | None:
    """A Slice that takes everything."""
    source = node.inputs[0]
    if "starts" in node.attributes:
        return _static_same_shape(_editor, node)
    given = [integers(value) for value in node.inputs[1:]]
    if len(given) < 2 or given[0] is None or given[1] is None:
        return None
    if len(given) > 3 and (given[3] is None or any(step != 1 for step in given[3])):
        return None
    whole = static_shape(source) is not None and static_shape(source) == static_shape(
        node.outputs[0]
    )
    endless = all(start == 0 for start in given[0]) and all(end >= 2**31 - 1 for end in given[1])
    return source if whole or endless else None


def _gather_to_slice(editor: Editor, node: ir.Node) -> ir.Value | None:
    """A Gather of constant neighboring indices; integers are left, since they may be sizes."""
    source, shape = node.inputs[0], static_shape(node.inputs[0])
    indices = contents(node.inputs[1]) if len(node.inputs) > 1 else None
    if indices is None or not shape or indices.ndim > 1 or indices.size == 0:
        return None
    if source is None or source.dtype is None or not source.dtype.is_floating_point():
        return None
    axis = node.attributes.get_int("axis", 0) % len(shape)
    places = [int(i) + shape[axis] if i < 0 else int(i) for i in indices.ravel()]
    first, last = places[0], places[-1]
    inside = first >= 0 and last < shape[axis]
    if not inside or places != list(range(first, last + 1)):
        return None
    if editor.graph.opset_imports.get("", 0) < _SLICE_INPUTS:
        return None
    piece = sliced(editor, node, source, axis, first, last + 1)
    return reshaped(editor, node, piece, node.outputs[0]) if indices.ndim == 0 else piece


def sliced(
    editor: Editor, node: ir.Node, source: ir.Value, axis: int, start: int, end: int
) -> ir.Value:
    """Elements ``start`` to ``end`` of a value along an axis, in front of a node (opset 10)."""
    dims = dims_of(source)
    assert dims is not None
    base = str(node.outputs[0].name)
    bounds = [
        editor.constant(np.array([value], np.int64), f"{base}__{name}")
        for name, value in (("start", start), ("end", end), ("axis", axis))
    ]
    shape = [*dims[:axis], end - start, *dims[axis + 1 :]]
    return editor.emit(node, "Slice", [source, *bounds], shape)


# Concat and Split


def _concat_of_split(_editor: Editor, node: ir.Node) -> ir.Value | None:
    """All pieces of a Split, put together again in order."""
    source = node.inputs[0]
    split = None if source is None else source.producer()
    if split is None or split.op_type != "Split" or split.domain:
        return None
    if list(node.inputs) != list(split.outputs) or not _same_axis(node, split, node.outputs[0]):
        return None
    return split.inputs[0]


def _same_axis(concat: ir.Node, split: ir.Node, value: ir.Value) -> bool:
    dims = dims_of(value)
    if dims is None:
        return False
    axes = concat.attributes.get_int("axis", 1), split.attributes.get_int("axis", 0)
    return axes[0] % len(dims) == axes[1] % len(dims)


def _concat_of_concat(editor: Editor, node: ir.Node) -> ir.Value | None:
    """One Concat for a Concat whose inputs are read by nothing else."""
    inputs: list[ir.Value | None] = []
    for value in node.inputs:
        inner = None if value is None else value.producer()
        joins = inner is not None and inner.op_type == "Concat" and not inner.domain
        if joins and value is not None and only_reader(value) is node:
            assert inner is not None
            if inner.graph is node.graph and _same_axis_of_concats(node, inner):
                inputs += inner.inputs
                continue
        inputs.append(value)
    if len(inputs) == len(node.inputs):
        return None
    attributes = {"axis": node.attributes.get_int("axis", 1)}
    return editor.emit(node, "Concat", inputs, dims_of(node.outputs[0]), attributes)


def _same_axis_of_concats(outer: ir.Node, inner: ir.Node) -> bool:
    dims = dims_of(outer.outputs[0])
    if not dims:
        return False
    first, second = (node.attributes.get_int("axis", 1) % len(dims) for node in (outer, inner))
    return first == second


def _split_of_concat(editor: Editor, node: ir.Node) -> ir.Value | None:
    """The inputs of a Concat that a Split takes apart along the same seams.

    Replaces all results but the first, which is left to the caller.
    """
    source = node.inputs[0]
    concat = None if source is None else source.producer()
    if concat is None or concat.op_type != "Concat" or concat.domain or source is None:
        return None
    if len(concat.inputs) != len(node.outputs) or not _same_axis(concat, node, source):
        return None
    pairs = list(zip(node.outputs, concat.inputs, strict=True))
    for result, piece in pairs:
        if piece is None or static_shape(piece) is None or not same_shape(result, piece):
            return None
        if result.is_graph_output():
            return None
    for result, piece in pairs[1:]:
        assert piece is not None
        if result.uses():
            result.replace_all_uses_with(piece)
    return pairs[0][1]


def _split_into_one(_editor: Editor, node: ir.Node) -> ir.Value | None:
    return node.inputs[0] if len(node.outputs) == 1 else None


_RULES: dict[str, Sequence[Rule]] = {
    "Identity": (_given,),
    "Dropout": (_dropout,),
    "Cast": (_cast,),
    "Expand": (_same_shape,),
    "Tile": (_static_same_shape,),
    "Pad": (_pad,),
    "Sum": (_alone, _sum),
    "Mean": (_alone,),
    "Max": (_bound_without_effect,),
    "Min": (_bound_without_effect,),
    "Mul": (_times_one,),
    "Div": (_times_one,),
    "Reshape": (_same_shape, _merge_reshapes, _keep_reduced),
    "Squeeze": (_same_shape, _merge_reshapes),
    "Unsqueeze": (_same_shape, _merge_reshapes, _keep_reduced),
    "Flatten": (_same_shape, _merge_reshapes),
    "Slice": (_whole_slice,),
    "Gather": (_gather_to_slice,),
    "Concat": (_alone, _concat_of_split, _concat_of_concat),
    "Split": (_split_into_one, _split_of_concat),
}
