"""Move a channel shuffle behind the depthwise convolution that reads it, or into a dense one.

    DepthwiseConv(Shuffle(x), w) = Shuffle(DepthwiseConv(x, w in the order of x's channels))
    Conv(Shuffle(x), w)          = Conv(x, w in the order of x's channels)

A shuffle is Reshape, Transpose, Reshape: channels ``(parts, each)`` become ``(each, parts)``. In
front of a depthwise convolution it stands between two kernels of which neither can take it in.
Behind, it meets the next convolution, whose kernel may read channels in any order.

Source: Zhang et al., "ShuffleNet: An Extremely Efficient Convolutional Neural Network for Mobile
Devices", 2017, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Array, Editor, contents, dims_of, only_reader, same_dim

_EXCHANGE = [0, 2, 1, 3, 4]


class MoveShuffles(ir.passes.InPlacePass):
    """Moves the shuffles of the main graph that only one convolution reads."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Move, a convolution at a time."""
        editor = Editor(model.graph)
        for node in list(model.graph):
            shuffle = _shuffle_of(node)
            if shuffle is None:
                continue
            if node.attributes.get_int("group", 1) == 1:
                _take_in(editor, node, shuffle)
            elif _is_depthwise(node, shuffle):
                _move(editor, node, shuffle)
        return ir.passes.PassResult(model, editor.modified)


@dataclass(frozen=True)
class _Shuffle:
    """A shuffle of the channels of ``source``, in ``parts`` of as many ``each``."""

    source: ir.Value
    result: ir.Value
    parts: int
    each: int

    @property
    def order(self) -> Array:
        """For each channel of the result, its place in the source."""
        places = np.arange(self.parts * self.each).reshape(self.parts, self.each)
        order: Array = places.T.ravel()
        return order


def _shuffle_of(node: ir.Node) -> _Shuffle | None:
    """The shuffle that a convolution of constant weights alone reads."""
    if (node.op_type, node.domain) != ("Conv", "") or contents(node.inputs[1]) is None:
        return None
    shuffle = _shuffle_that_makes(node.inputs[0])
    return shuffle if shuffle is not None and only_reader(shuffle.result) is node else None


def _is_depthwise(node: ir.Node, shuffle: _Shuffle) -> bool:
    """Whether a convolution has a filter per channel, known biases, and a plane of known size."""
    weight, channels = contents(node.inputs[1]), shuffle.parts * shuffle.each
    assert weight is not None
    depthwise = node.attributes.get_int("group", 1) == channels == weight.shape[0]
    known = all(bias is None or contents(bias) is not None for bias in node.inputs[2:])
    dims = dims_of(node.outputs[0])
    return depthwise and known and dims is not None and all(isinstance(d, int) for d in dims[1:])


def _shuffle_that_makes(value: ir.Value | None) -> _Shuffle | None:
    """The shuffle whose result a value is."""
    joined = _behind(value, "Reshape")
    exchanged = _behind(joined, "Transpose")
    split = _behind(exchanged, "Reshape")
    dims, inner = dims_of(split), dims_of(exchanged)
    if value is None or split is None or dims is None or inner is None:
        return None
    assert joined is not None
    transpose = joined.producer()
    assert transpose is not None
    order = transpose.attributes.get_ints("perm", [])
    if list(order) != _EXCHANGE or len(inner) != 5 or len(dims) != 4:
        return None
    after, (parts, each) = dims_of(value), inner[1:3]
    if not isinstance(parts, int) or not isinstance(each, int) or after is None:
        return None
    same = len(after) == 4 and all(map(same_dim, dims, after))
    kept = all(map(same_dim, (dims[0], *dims[2:]), (inner[0], *inner[3:])))
    return _Shuffle(split, value, parts, each) if same and kept else None


def _behind(value: ir.Value | None, operator: str) -> ir.Value | None:
    """What the node of this operator reads that makes a value."""
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == operator else None


def _take_in(editor: Editor, node: ir.Node, shuffle: _Shuffle) -> None:
    """Let a dense convolution read the shuffle's source."""
    joined = node.inputs[0]
    assert joined is not None
    node.replace_input_with(1, _reordered(editor, node.inputs[1], shuffle, axis=1))
    node.replace_input_with(0, shuffle.source)
    reshape = joined.producer()
    assert reshape is not None
    editor.remove_dead(reshape)
    editor.modified = True


def _move(editor: Editor, node: ir.Node, shuffle: _Shuffle) -> None:
    """Write the convolution on the shuffle's source, and the shuffle behind it."""
    inputs = [shuffle.source, *(_reordered(editor, value, shuffle) for value in node.inputs[1:])]
    dims = dims_of(node.outputs[0])
    assert dims is not None
    batch, channels, *plane = dims
    split, joined = [shuffle.parts, shuffle.each], [channels]

    def reshape(value: ir.Value, inner: list[Any]) -> ir.Value:
        target = np.array([0, *inner, *plane], np.int64)  # 0 stands for the number of images
        shape = editor.constant(target, f"{node.outputs[0].name}__shape")
        return editor.emit(node, "Reshape", [value, shape], [batch, *inner, *plane])

    result = reshape(editor.emit(node, "Conv", inputs, dims, dict(node.attributes)), split)
    turned = [batch, *reversed(split), *plane]
    result = editor.emit(node, "Transpose", [result], turned, {"perm": _EXCHANGE})
    editor.replace(node.outputs[0], reshape(result, joined))


def _reordered(
    editor: Editor, value: ir.Value | None, shuffle: _Shuffle, axis: int = 0
) -> ir.Value | None:
    """A weight or a bias in the order of the source's channels."""
    array = contents(value)
    if array is None or value is None:
        return None
    moved = np.empty_like(array)
    moved[(slice(None),) * axis + (shuffle.order,)] = array
    return editor.constant(moved, f"{value.name}__reordered")
