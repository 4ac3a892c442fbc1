"""Compute a transposed convolution as ordinary ones, and spread their channels over space.

Each output of a transposed convolution with stride s sums every s-th tap of its kernel. Outputs
that are s apart use the same taps. So it is s convolutions, one for each phase, with about
kernel / s taps on the input as it is, whose outputs alternate:

    y[s q + r] = sum over m of x[q - m] w[s m + r],   r in 0..s-1

    x --> Conv with taps w[s m + r] as channels of phase r --> DepthToSpace --> Slice for the pads

Where s divides the kernel, one convolution has the channels of all phases; otherwise phases have
different numbers of taps, and each is a convolution of its own. (Filling up with zeros would make
NaN of an infinite input.) What follows element by element is moved in front of the spreading, where
it is fused with the convolution. (Shi et al., "Is the deconvolution layer the same as a
convolutional layer?", 2016.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Array, Editor

_ELEMENTWISE = frozenset(
    "Elu Erf Exp Gelu HardSigmoid HardSwish LeakyRelu Neg Relu Selu Sigmoid Softplus Tanh".split()
)
"""Operators of one input that may change places with a movement of elements."""

_END = np.iinfo(np.int64).max

_OPSET = 10
"""The first whose Slice takes its bounds as inputs."""


@dataclass(frozen=True)
class _Transposed:
    """A transposed convolution of known weights; all but ``weight`` by spatial axis.

    Attributes:
        weight: Shape (channels in, channels out, *kernel).
        strides: Steps between what two inputs add to.
        before: Elements cut off in front.
        behind: Elements cut off at the end; negative if some are added.
    """

    weight: Array
    strides: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        """Taps by spatial axis."""
        return tuple(self.weight.shape[2:])

    @property
    def most_taps(self) -> tuple[int, ...]:
        """Taps of the phase that has most."""
        return tuple(-(-size // step) for size, step in zip(self.kernel, self.strides, strict=True))

    @property
    def tail(self) -> tuple[int, ...]:
        """Elements to cut off behind what the phases give."""
        ends = (most * step for most, step in zip(self.most_taps, self.strides, strict=True))
        rows = zip(ends, self.kernel, self.behind, strict=True)
        return tuple(end - size + cut for end, size, cut in rows)


class SplitTransposedConvolutions(ir.passes.InPlacePass):
    """Rewrites the transposed convolutions of the main graph."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite each that fits."""
        editor = Editor(model.graph)
        if model.graph.opset_imports.get("", 0) >= _OPSET:
            for node in list(model.graph):
                found = _read(node)
                if found is not None:
                    _rewrite(editor, node, found)
        return ir.passes.PassResult(model, editor.modified)


def _read(node: ir.Node) -> _Transposed | None:
    """A node's figures, if it can be rewritten."""
    if node.op_type != "ConvTranspose" or node.domain or node.attributes.get_int("group", 1) != 1:
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    if "output_shape" in node.attributes or any(
        value is not None and value.const_value is None for value in node.inputs[1:]
    ):
        return None
    weight = node.inputs[1].const_value.numpy()  # type: ignore[union-attr]
    rank = weight.ndim - 2
    strides, dilations = (_numbers(node, name, rank, 1) for name in ("strides", "dilations"))
    pads, added = _numbers(node, "pads", 2 * rank, 0), _numbers(node, "output_padding", rank, 0)
    behind = tuple(pad - extra for pad, extra in zip(pads[rank:], added, strict=True))
    found = _Transposed(weight, strides, pads[:rank], behind)
    return found if set(dilations) == {1} and _fits(found) else None


def _numbers(node: ir.Node, name: str, count: int, default: int) -> tuple[int, ...]:
    given = node.attributes.get(name)
    return (default,) * count if given is None else tuple(given.value)


def _fits(found: _Transposed) -> bool:
    if any(size < stride for size, stride in zip(found.kernel, found.strides, strict=True)):
        return False  # some outputs get nothing
    if set(found.strides) == {1}:
        most = tuple(size - 1 for size in found.kernel)
        return all(p <= m for p, m in zip((*found.before, *found.behind), most * 2, strict=True))
    square = len(set(found.strides)) == 1 and len(found.strides) == 2
    return min(found.tail) >= 0 and (square or len(found.strides) == 1)


def _rewrite(editor: Editor, node: ir.Node, found: _Transposed) -> None:
    if set(found.strides) == {1}:
        editor.replace(node.outputs[0], _plain(editor, node, found))
        return
    value, old = _phases(editor, node, found), node.outputs[0]
    while (follower := _follower(old)) is not None:
        value = editor.emit(node, follower.op_type, [value], None, dict(_attributes(follower)))
        old = follower.outputs[0]
    editor.replace(old, _cut(editor, node, _spread(editor, node, value, found), found))


def _plain(editor: Editor, node: ir.Node, found: _Transposed) -> ir.Value:
    """A convolution for one with a stride of 1, whose pads are what the other's are short of."""
    (weight,) = _weights(found)
    cut = zip(found.kernel * 2, (*found.before, *found.behind), strict=True)
    return _convolution(editor, node, weight, 1, [size - 1 - less for size, less in cut])


def _phases(editor: Editor, node: ir.Node, found: _Transposed) -> ir.Value:
    """The outputs of all phases as channels, those of a phase together."""
    weights = _weights(found)
    more = [taps - 1 for taps in found.most_taps]
    if not any(size % step for size, step in zip(found.kernel, found.strides, strict=True)):
        return _convolution(editor, node, np.concatenate(weights), len(weights), more * 2)
    parts = [
        _convolution(editor, node, weight, 1, [*(taps - 1 for taps in weight.shape[2:]), *more])
        for weight in weights
    ]
    return editor.emit(node, "Concat", parts, None, {"axis": 1})


def _weights(found: _Transposed) -> list[Array]:
    """Weights of the convolution of each phase: (channels out, channels in, *taps)."""
    whole = found.weight.swapaxes(0, 1)
    axes = tuple(range(2, whole.ndim))
    every = (slice(None), slice(None))
    return [
        np.flip(whole[every + tuple(map(slice, phase, found.kernel, found.strides))], axes)
        for phase in itertools.product(*map(range, found.strides))
    ]


def _convolution(
    editor: Editor, node: ir.Node, weight: Array, phases: int, pads: Sequence[int]
) -> ir.Value:
    inputs: list[ir.Value | None] = [node.inputs[0]]
    inputs.append(editor.constant(weight, f"{node.name}__weight"))
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = node.inputs[2].const_value.numpy()  # type: ignore[union-attr]
        inputs.append(editor.constant(np.tile(bias, phases), f"{node.name}__bias"))
    return editor.emit(node, "Conv", inputs, None, {"pads": pads})


def _follower(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value, if it is element-wise and of one input."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0].node
    known = node.op_type in _ELEMENTWISE and not node.domain and len(node.inputs) == 1
    return node if known and node.graph is value.producer().graph else None  # type: ignore[union-attr]


def _attributes(node: ir.Node) -> list[tuple[str, object]]:
    return [(name, attribute.value) for name, attribute in node.attributes.items()]


def _spread(editor: Editor, node: ir.Node, value: ir.Value, found: _Transposed) -> ir.Value:
    """Channels as neighbors in space."""
    (stride, *more), channels = found.strides, found.weight.shape[1]
    if more:
        return editor.emit(node, "DepthToSpace", [value], None, {"blocksize": stride})

    def reshaped(tensor: ir.Value, *dims: int) -> ir.Value:
        shape = editor.constant(np.array(dims, np.int64), f"{node.name}__shape")
        return editor.emit(node, "Reshape", [tensor, shape], None)

    phases = reshaped(value, 0, stride, channels, -1)
    turned = editor.emit(node, "Transpose", [phases], None, {"perm": [0, 2, 3, 1]})
    return reshaped(turned, 0, channels, -1)


def _cut(editor: Editor, node: ir.Node, value: ir.Value, found: _Transposed) -> ir.Value:
    """What the pads leave."""
    if not any((*found.before, *found.tail)):
        return value
    ends = [-count if count else _END for count in found.tail]
    axes = range(2, 2 + len(ends))
    rows: tuple[Sequence[int], ...] = (found.before, ends, axes)
    bounds = [editor.constant(np.array(row, np.int64), f"{node.name}__bounds") for row in rows]
    return editor.emit(node, "Slice", [value, *bounds], None)
