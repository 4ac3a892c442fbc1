"""Fold a Pad into the convolution or pooling that reads it.

    Conv(Pad(x, zeros))        = Conv(x) with larger pads
    MaxPool(Pad(x, -infinity)) = MaxPool(x) with larger pads
    AveragePool(Pad(x, zeros)) = AveragePool(x) with larger pads that count

A Reshape between that only adds axes of one element is passed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from hybridc.passes.editor import Editor, dims_of, integers, number, static_shape

_READERS = frozenset(("Conv", "MaxPool", "AveragePool"))


class FoldPads(ir.passes.InPlacePass):
    """Folds the pads of the main graph; others that read a padded value keep it."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold, a reader at a time."""
        editor = Editor(model.graph)
        for node in list(model.graph):
            if node.op_type in _READERS and not node.domain and node.inputs:
                _pass_reshape(editor, node)
                while _fold(editor, node):
                    editor.modified = True
        return ir.passes.PassResult(model, editor.modified)


def _fold(editor: Editor, node: ir.Node) -> bool:
    """Fold the Pad that ``node`` reads into it."""
    source = node.inputs[0]
    pad = None if source is None else source.producer()
    pads = None if pad is None else _constant_pads(pad)
    if pad is None or pads is None or pad.inputs[0] is None or pad.graph is not node.graph:
        return False
    before, after = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    if any((*before[:2], *after[:2])) or min(pads) < 0 or len(before) < 3:
        return False
    own = _own_pads(node, len(before) - 2)
    if own is None or not _value_fits(node, pad, own):
        return False
    total = [p + q for p, q in zip(own, (*before[2:], *after[2:]), strict=True)]
    if node.op_type != "Conv" and not _smaller_than_kernel(node, total):
        return False
    node.attributes.pop("auto_pad", None)
    node.attributes["pads"] = ir.AttrInt64s("pads", total)
    if node.op_type == "AveragePool":
        node.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 1)
    node.replace_input_with(0, pad.inputs[0])
    editor.remove_dead(pad)
    return True


def _constant_pads(pad: ir.Node) -> list[int] | None:
    """What a Pad adds in front of and behind each axis, if it adds a constant."""
    if pad.op_type != "Pad" or pad.domain:
        return None
    dims = dims_of(pad.inputs[0])
    if dims is None or pad.attributes.get_string("mode", "constant") != "constant":
        return None
    if "pads" in pad.attributes:
        pads: Sequence[int] | None = list(pad.attributes["pads"].value)
    else:
        pads = integers(pad.inputs[1]) if len(pad.inputs) > 1 else None
    if pads is None:
        return None
    axes: Sequence[int] | None = range(len(dims))
    if len(pad.inputs) > 3 and pad.inputs[3] is not None:
        axes = integers(pad.inputs[3])
    if axes is None or len(pads) != 2 * len(axes):
        return None
    result = [0] * (2 * len(dims))
    for index, axis in enumerate(axes):
        result[axis % len(dims)] = pads[index]
        result[axis % len(dims) + len(dims)] = pads[index + len(axes)]
    return result


def _pad_value(pad: ir.Node) -> float | None:
    if "value" in pad.attributes:
        return float(pad.attributes["value"].value)
    if len(pad.inputs) > 2 and pad.inputs[2] is not None:
        return number(pad.inputs[2])
    return 0.0


def _own_pads(node: ir.Node, spatial: int) -> list[int] | None:
    """The pads that a node has already; ``None`` if they depend on the size of its input."""
    padding = node.attributes.get_string("auto_pad", "NOTSET")
    if padding not in ("NOTSET", "VALID"):
        return None
    given = node.attributes.get("pads")
    pads = [0] * (2 * spatial) if given is None or padding == "VALID" else [*given.value]
    return pads if len(pads) == 2 * spatial else None


def _value_fits(node: ir.Node, pad: ir.Node, own: Sequence[int]) -> bool:
    """Whether what the Pad adds is what the node's own pads stand for."""
    value = _pad_value(pad)
    if value is None:
        return False
    if node.op_type == "Conv":
        return value == 0
    if len(node.outputs) > 1 or node.attributes.get_int("ceil_mode", 0) == 1:
        return False
    if node.op_type == "MaxPool":
        return value == -np.inf
    counted = node.attributes.get_int("count_include_pad", 0) == 1 or not any(own)
    return value == 0 and counted


def _smaller_than_kernel(node: ir.Node, pads: Sequence[int]) -> bool:
    """What ONNX Runtime asks of a pooling's pads."""
    kernel = list(node.attributes["kernel_shape"].value)
    return all(pad < size for pad, size in zip(pads, kernel * 2, strict=True))


def _pass_reshape(editor: Editor, node: ir.Node) -> None:
    """Read ``Pad(Reshape(x))`` for ``Reshape(Pad(x))`` where the Reshape only adds ones."""
    value = node.inputs[0]
    reshape = None if value is None else value.producer()
    if value is None or reshape is None or reshape.op_type not in ("Reshape", "Unsqueeze"):
        return
    padded = reshape.inputs[0]
    pad = None if padded is None else padded.producer()
    pads = None if pad is None or reshape.domain else _constant_pads(pad)
    before, after = static_shape(padded), static_shape(value)
    if pad is None or pads is None or before is None or after is None or min(pads) < 0:
        return
    if pad.graph is not node.graph or reshape.graph is not node.graph:
        return
    moved = _moved_pads(pads, before, after)
    if moved is None:
        return
    rank = len(after)
    inner = [dim - moved[i] - moved[i + rank] for i, dim in enumerate(after)]
    if 0 in inner or _pad_value(pad) != 0:
        return
    target = editor.constant(np.array(inner, np.int64), f"{value.name}__shape")
    plain = editor.emit(reshape, "Reshape", [pad.inputs[0], target], inner)
    if editor.graph.opset_imports.get("", 0) < 11:
        result = editor.emit(reshape, "Pad", [plain], after, {"pads": moved})
    else:
        sizes = editor.constant(np.array(moved, np.int64), f"{value.name}__pads")
        result = editor.emit(reshape, "Pad", [plain, sizes], after)
    node.replace_input_with(0, result)
    editor.remove_dead(reshape)
    editor.modified = True


def _moved_pads(
    pads: Sequence[int], before: Sequence[int], after: Sequence[int]
) -> list[int] | None:
    """Pads of the axes after a Reshape, if it leaves the order of longer axes alone."""
    left = [axis for axis, dim in enumerate(before) if dim != 1]
    right = [axis for axis, dim in enumerate(after) if dim != 1]
    if [before[axis] for axis in left] != [after[axis] for axis in right]:
        return None
    moved = [0] * (2 * len(after))
    for source, target in zip(left, right, strict=True):
        moved[target] = pads[source]
        moved[target + len(after)] = pads[source + len(before)]
    return moved
