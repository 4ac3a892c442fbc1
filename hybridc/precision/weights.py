"""Weights in fewer bits, in blocks with a scale each; what is computed stays float.

A weight of a convolution or matrix product becomes a DequantizeLinear of integers, with blocks
along the axis that is summed over. A table that rows are taken from (an embedding) becomes a Gather
of integers: only the rows that are taken are turned into floats. Two numbers of 4 bits share a byte
there, one from each half of a row, since Gather takes no type of 4 bits.

Targets turn the weights into floats when they run: the bundle is small, the run no faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from hybridc.errors import UsageError
from hybridc.passes.editor import Array, Editor, contents, dims_of
from hybridc.passes.raise_opset import ensure_opset

OPSET = 21
"""Opset from which DequantizeLinear takes blocks and 4 bits."""

BLOCKS = {4: 32, 8: 128}
"""Weights that share a scale, by the bits of a weight."""

MIN_ELEMENTS, MIN_SUMMED = 2048, 8
"""Weights with fewer elements, or fewer along the axis of their blocks, stay as they are."""

_SMALLEST = float(np.finfo(np.float32).tiny)


def quantize_weights(model: onnx.ModelProto, bits: int) -> onnx.ModelProto:
    """A model whose large weights are stored in ``bits`` bits, 4 or 8.

    Raises:
        UsageError: It has none, or it cannot be raised to the opset that this needs.
    """
    whole = ir.from_proto(model)
    if not ensure_opset(whole, OPSET):
        raise UsageError(
            f"weights in {bits} bits need opset {OPSET}, which the model cannot be raised to; "
            "export it with that opset"
        )
    editor = Editor(whole.graph)
    known: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in list(whole.graph):
        if node.op_type == "Gather" and not node.domain:
            _table(editor, node, bits)
        elif node.op_type in _AXES and not node.domain:
            _weight(editor, node, bits, known)
    if not editor.modified:
        raise UsageError(
            f"there is nothing to quantize: no constant weight of {MIN_ELEMENTS} elements or more"
        )
    whole.ir_version = max(whole.ir_version or 0, 10)
    result = ir.to_proto(whole)
    drop_unread(result)
    return result


def quantize_tables(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose large embeddings are stored in 8 bits; the model itself if it has none."""
    whole = ir.from_proto(model)
    editor = Editor(whole.graph)
    for node in list(whole.graph):
        if node.op_type == "Gather" and not node.domain:
            _table(editor, node, 8)
    if not editor.modified:
        return model
    result = ir.to_proto(whole)
    drop_unread(result)
    return result


@dataclass(frozen=True)
class Blocks:
    """Integers with a scale for each block along one axis."""

    codes: Array
    scales: Array


def in_blocks(array: Array, axis: int, bits: int, block: int) -> Blocks:
    """Round weights to integers; the largest magnitude of each block becomes the largest one."""
    moved = np.moveaxis(array.astype(np.float64), axis, -1)
    count = -(-moved.shape[-1] // block)
    padding = [(0, 0)] * (moved.ndim - 1) + [(0, count * block - moved.shape[-1])]
    split = np.pad(moved, padding).reshape(*moved.shape[:-1], count, block)
    most = (1 << (bits - 1)) - 1
    scales = np.abs(split).max(axis=-1) / most
    scales = np.where(scales > _SMALLEST, scales, 1.0).astype(np.float32)
    codes = np.rint(split / scales[..., None].astype(np.float64))
    codes = np.clip(codes, -most, most).astype(np.int8)
    codes = codes.reshape(*moved.shape[:-1], -1)[..., : moved.shape[-1]]
    return Blocks(np.moveaxis(codes, -1, axis), np.moveaxis(scales, -1, axis))


_AXES = {"MatMul": 0, "Gemm": 0, "Conv": 1}
"""The axis of the weight that is summed over."""


def _is_large(value: ir.Value | None) -> bool:
    array = contents(value)
    return array is not None and array.dtype == np.float32 and array.size >= MIN_ELEMENTS


def _weight(
    editor: Editor, node: ir.Node, bits: int, known: dict[tuple[ir.Value, int], ir.Value]
) -> None:
    """Read the second input of a node from integers."""
    value = node.inputs[1]
    array = contents(value)
    if value is None or array is None or not _is_large(value) or array.ndim < 2:
        return
    axis = _AXES[node.op_type]
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0:
        axis = 1
    if node.op_type == "MatMul":
        axis = array.ndim - 2
    if array.shape[axis] < MIN_SUMMED or not np.all(np.isfinite(array)):
        return
    key = (value, axis)
    if key not in known:
        blocks = in_blocks(array, axis, bits, BLOCKS[bits])
        codes = blocks.codes.astype(ml_dtypes.int4) if bits == 4 else blocks.codes
        known[key] = editor.emit(
            node,
            "DequantizeLinear",
            [
                editor.constant(codes, f"{value.name}__int{bits}"),
                editor.constant(blocks.scales, f"{value.name}__scales"),
            ],
            dims_of(value),
            {"axis": axis, "block_size": BLOCKS[bits]},
            dtype=ir.DataType.FLOAT,
        )
    node.replace_input_with(1, known[key])
    editor.modified = True


def _table(editor: Editor, node: ir.Node, bits: int) -> None:
    """Take rows of a table of integers."""
    table, indices = node.inputs[0], node.inputs[1]
    array, taken = contents(table), dims_of(indices)
    if array is None or table is None or taken is None or not _is_large(table):
        return
    width = array.shape[-1]
    block = BLOCKS[4] if bits == 4 else width
    if (
        array.ndim != 2
        or node.attributes.get_int("axis", 0) != 0
        or width % (2 * block if bits == 4 else 1)
    ):
        return
    if not np.all(np.isfinite(array)):
        return
    blocks = in_blocks(array, 1, bits, block)
    emit = _Emitter(editor, node)
    if bits == 4:
        rows = emit.rows(_halves(blocks.codes), f"{table.name}__int4")
        low = emit("BitwiseAnd", [rows, emit.constant(np.uint8(15))])
        high = emit("BitShift", [rows, emit.constant(np.uint8(4))], direction="RIGHT")
        codes = emit("Concat", [low, high], axis=-1)
        floats = emit("Cast", [codes], ir.DataType.FLOAT, to=ir.DataType.FLOAT)
        floats = emit("Sub", [floats, emit.constant(np.float32(8))])
        split = emit.reshape(floats, [0] * len(taken) + [width // block, block])
        scales = emit(
            "Unsqueeze",
            [emit.rows(blocks.scales, f"{table.name}__scales"), emit.constant(np.array([-1]))],
        )
        result = emit.reshape(emit("Mul", [split, scales]), [0] * len(taken) + [width])
    else:
        rows = emit.rows(blocks.codes, f"{table.name}__int8")
        floats = emit("Cast", [rows], ir.DataType.FLOAT, to=ir.DataType.FLOAT)
        result = emit("Mul", [floats, emit.rows(blocks.scales, f"{table.name}__scales")])
    result.shape = node.outputs[0].shape
    editor.replace(node.outputs[0], result)


def _halves(codes: Array) -> Array:
    """Two numbers of 4 bits, moved to 0 ... 15, in each byte: the left half of a row lies low."""
    middle = codes.shape[1] // 2
    moved = (codes.astype(np.int16) + 8).astype(np.uint8)
    return moved[:, :middle] | (moved[:, middle:] << 4)


@dataclass(frozen=True)
class _Emitter:
    """Puts nodes in front of a Gather."""

    editor: Editor
    node: ir.Node

    def __call__(
        self,
        operator: str,
        inputs: list[ir.Value],
        dtype: ir.DataType | None = None,
        **attributes: object,
    ) -> ir.Value:
        return self.editor.emit(self.node, operator, inputs, None, attributes, dtype=dtype)

    def constant(self, value: Array | np.generic) -> ir.Value:
        """A small constant."""
        return self.editor.constant(np.asarray(value), f"{self.node.outputs[0].name}__constant")

    def rows(self, table: Array, name: str) -> ir.Value:
        """The rows of another table that the Gather takes."""
        indices = self.node.inputs[1]
        assert indices is not None
        return self("Gather", [self.editor.constant(table, name), indices])

    def reshape(self, value: ir.Value, shape: list[int]) -> ir.Value:
        """A value in another shape; 0 stands for a dimension that stays."""
        return self("Reshape", [value, self.constant(np.array(shape, np.int64))])


def drop_unread(model: onnx.ModelProto) -> None:
    """Remove weights that nothing reads any more."""
    read = {name for node in model.graph.node for name in node.input}
    read |= {value.name for value in model.graph.output}
    for node in model.graph.node:
        for attribute in node.attribute:
            for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                read |= set(_names_in(graph))
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _names_in(graph: onnx.GraphProto) -> Iterator[str]:
    """Names that a subgraph reads, its own included."""
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _names_in(attribute.g)
            for inner in attribute.graphs:
                yield from _names_in(inner)
