"""Make a Gemm of a matrix product and what surrounds it.

MatMul(a, b) + c                Gemm(a, b, c)
Gemm(a, b) + c                  Gemm(a, b, c)
Gemm(Transpose(a), b)           Gemm(a, b) with ``transA``, and so for b
"""

from __future__ import annotations

import onnx_ir as ir
from hybridc.passes.editor import Dims, Editor, dims_of, only_reader, same_dim

_FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE))


class FuseGemm(ir.passes.InPlacePass):
    """Fuses in the main graph, over float32 and float64 matrices."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add summands first, then absorb transpositions."""
        editor = Editor(model.graph)
        for node in list(model.graph):
            if node.op_type == "Add" and not node.domain and node.graph is not None:
                _fuse_sum(editor, node)
        for node in list(model.graph):
            if node.op_type == "Gemm" and not node.domain and node.graph is not None:
                _absorb_transposes(editor, node)
        return ir.passes.PassResult(model, editor.modified)


def _fuse_sum(editor: Editor, node: ir.Node) -> None:
    if len(node.inputs) != 2:
        return
    for product, summand in (node.inputs, node.inputs[::-1]):
        anchor = None if product is None else product.producer()
        if anchor is None or product is None or summand is None or product is summand:
            continue
        if anchor.graph is not node.graph or only_reader(product) is not node:
            continue
        if not _is_product(anchor) or not _spreads(dims_of(summand), dims_of(product)):
            continue
        attributes = {name: a.value for name, a in anchor.attributes.items()}
        attributes.pop("beta", None)
        inputs = [*anchor.inputs[:2], summand]
        result = editor.emit(node, "Gemm", inputs, dims_of(product), attributes)
        editor.replace(node.outputs[0], result)
        return


def _is_product(node: ir.Node) -> bool:
    """Whether a node is a plain product of two matrices."""
    if node.domain or node.op_type not in ("MatMul", "Gemm") or len(node.inputs) < 2:
        return False
    if node.op_type == "Gemm" and any(value is not None for value in node.inputs[2:]):
        return False
    matrices = all(len(dims_of(value) or ()) == 2 for value in node.inputs[:2])
    return matrices and node.outputs[0].dtype in _FLOATS


def _spreads(summand: Dims | None, product: Dims | None) -> bool:
    """Whether a summand broadcasts to the shape of the product."""
    if summand is None or product is None or len(summand) > len(product):
        return False
    pairs = zip(summand[::-1], product[::-1], strict=False)
    return all(dim == 1 or same_dim(dim, other) for dim, other in pairs)


def _absorb_transposes(editor: Editor, node: ir.Node) -> None:
    for index, name in ((0, "transA"), (1, "transB")):
        source = node.inputs[index] if index < len(node.inputs) else None
        transpose = None if source is None else source.producer()
        if transpose is None or transpose.op_type != "Transpose" or transpose.domain:
            continue
        matrix = transpose.inputs[0]
        perm = transpose.attributes.get("perm")
        if transpose.graph is not node.graph or len(dims_of(matrix) or ()) != 2:
            continue
        if perm is not None and list(perm.value) != [1, 0]:
            continue
        node.attributes[name] = ir.AttrInt64(name, 1 - node.attributes.get_int(name, 0))
        node.replace_input_with(index, matrix)
        editor.modified = True
        editor.remove_dead(transpose)
