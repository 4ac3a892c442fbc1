import pytest
from harness import Case, check, floats, whole

SHAPES = [
    ((3, 4), (4, 5)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (7, 4, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((1, 3, 4), (2, 4, 1)),
    ((3, 0), (0, 5)),
]

PRODUCTS = [
    *(Case("MatMul", [floats(*left), floats(*right, seed=1)]) for left, right in SHAPES),
    *(
        Case("MatMul", [floats(3, 40, dtype=dtype), floats(40, 5, dtype=dtype)])
        for dtype in ("float64", "float16")
    ),
    *(
        Case("MatMul", [whole(3, 4, dtype=dtype), whole(4, 5, dtype=dtype)])
        for dtype in ("int32", "int64")
    ),
    Case("MatMul", [floats(3, 4), floats(4, 5)], constants=[1]),
    Case("MatMul", [floats(3, 4), floats(4, 5)], constants=[0]),
    Case("MatMul", [floats(2, 3, 4), floats(4, 5)], constants=[1], symbolic={0: {0: "n", 1: "m"}}),
    Case("MatMul", [floats(2, 3, 4), floats(2, 4, 3)], symbolic={0: {1: "m"}, 1: {2: "m"}}),
]


def gemm(shapes, attributes, constants=(), dtype="float32", opset=13):
    arrays = [floats(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    return Case("Gemm", arrays, attributes, opset=opset, constants=constants)


GEMMS = [
    gemm([(3, 4), (4, 5), (5,)], {}),
    gemm([(3, 4), (4, 5)], {}),
    gemm([(3, 4), (5, 4), (5,)], {"transB": 1}, constants=[1, 2]),
    gemm([(3, 4), (5, 4), (5,)], {"transB": 1}),
    gemm([(4, 3), (5, 4), (3, 1)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": -2.0}),
    gemm([(4, 3), (4, 5), ()], {"transA": 1, "alpha": 0.5, "beta": 0.25}, constants=[2]),
    gemm([(3, 4), (4, 5), (1, 5)], {"beta": 0.5}, constants=[1, 2]),
    gemm([(3, 4), (4, 5), (3, 5)], {"beta": 0.0}),
    gemm([(3, 4), (4, 5), (1,)], {}, constants=[2]),
    gemm([(3, 4), (4, 5), (5,)], {}, dtype="float64"),
    gemm([(3, 4), (4, 5), (5,)], {}, opset=7),
    gemm([(3, 4), (4, 5), (3, 5)], {}, opset=9),
]

EINSUMS = [
    Case("Einsum", [floats(3, 4), floats(4, 5)], {"equation": "ij,jk->ik"}),
    Case("Einsum", [floats(2, 3, 4), floats(2, 4, 5)], {"equation": "bij, bjk -> bik"}),
    Case("Einsum", [floats(3, 4)], {"equation": "ij->ji"}),
    Case("Einsum", [floats(3, 4)], {"equation": "ij->i"}),
    Case("Einsum", [floats(3, 3)], {"equation": "ii->i"}),
    Case("Einsum", [floats(2, 3, 4), floats(2, 5, 4)], {"equation": "...ij,...kj->...ik"}),
    Case("Einsum", [floats(3, 4), floats(4, 5)], {"equation": "ij,jk"}),
    Case("Einsum", [floats(3), floats(3)], {"equation": "i,i->"}),
    Case("Einsum", [floats(2, 3, 4), floats(4, 5), floats(5)], {"equation": "aBc,cd,d->aB"}),
]


@pytest.mark.parametrize("case", [*PRODUCTS, *GEMMS, *EINSUMS], ids=str)
def test_linear(case):
    check(case)
