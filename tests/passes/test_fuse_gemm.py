import onnx_ir as ir
import pytest
from hybridc.passes.fuse_gemm import FuseGemm
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

WEIGHTS = {
    "w": random(3, 4, seed=1),
    "row": random(4, seed=2),
    "rows": random(2, 4, seed=3),
    "column": random(2, 1, seed=4),
    "cube": random(1, 1, 4, seed=5),
    "t": random(4, 3, seed=6),
}


def model_of(nodes, result=(2, 4), dims=(2, 3)):
    read = {name for n in nodes for name in n.input}
    weights = {name: array for name, array in WEIGHTS.items() if name in read}
    return infer_shapes(make_model(nodes, {"x": dims}, {"y": result}, weights))


def check(model, expected, dims=(2, 3)):
    after = apply(FuseGemm(), model)
    assert operators(after) == expected
    assert_same_results(model, after, {"x": random(*dims)})


@pytest.mark.parametrize("summand", ["row", "rows", "column"])
@pytest.mark.parametrize(
    "product", [node("MatMul", "x w", "p"), node("Gemm", "x w", "p", alpha=2.0)]
)
def test_a_sum(product, summand):
    check(model_of([product, node("Add", f"{summand} p", "y")]), ["Gemm"])


def test_a_sum_of_two_products():
    nodes = [node("MatMul", "x w", "p"), node("MatMul", "x w", "q"), node("Add", "p q", "y")]
    check(model_of(nodes), ["MatMul", "Gemm"])


def test_transposed_factors():
    nodes = [
        node("Transpose", "x", "xt"),
        node("Transpose", "xt", "xx", perm=[1, 0]),
        node("Transpose", "t", "tt"),
        node("Gemm", "xx tt", "y"),
    ]
    check(model_of(nodes), ["Transpose", "Gemm"])


@pytest.mark.parametrize(
    ("nodes", "result"),
    [
        ([node("MatMul", "x w", "p"), node("Add", "p cube", "y")], (1, 2, 4)),
        ([node("MatMul", "x w", "p"), node("Sub", "p row", "y")], (2, 4)),
        ([node("MatMul", "x w", "p"), node("Add", "p p", "y")], (2, 4)),
        ([node("Gemm", "x w row", "p"), node("Add", "p rows", "y")], (2, 4)),
    ],
    ids=["more axes", "difference", "itself", "has a summand"],
)
def test_what_looks_alike_stays(nodes, result):
    assert not FuseGemm()(ir.from_proto(model_of(nodes, result))).modified


def test_batches_stay():
    model = model_of([node("MatMul", "x w", "p"), node("Add", "p row", "y")], (5, 2, 4), (5, 2, 3))
    assert not FuseGemm()(ir.from_proto(model)).modified
