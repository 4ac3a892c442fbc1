import numpy as np
import onnx
import onnxruntime
import pytest
from harness import assert_same, floats, lower_model, run_lowered

from hybridc.errors import UnsupportedError

HEADER = '<ir_version: 8, opset_import: ["": 17]>'
GRAPHS = {
    "construct and take": """
        one (float[2, 3] x, float[2, 3] y) => (float[2, 3] z) {
            list = SequenceConstruct(x, y)
            last = Constant<value_int = -1>()
            taken = SequenceAt(list, last)
            z = Neg(taken)
        }""",
    "insert and erase": """
        two (float[2, 3] x, float[2, 3] y) => (float[N, 3] z, int64 count) {
            none = SequenceEmpty()
            zero = Constant<value_int = 0>()
            a = SequenceInsert(none, x)
            b = SequenceInsert(a, y, zero)
            c = SequenceInsert(b, x)
            d = SequenceErase(c, zero)
            e = SequenceInsert(d, y)
            count = SequenceLength(e)
            z = ConcatFromSequence<axis = 0>(e)
        }""",
    "stack": """
        three (float[2, 3] x, float[2, 3] y) => (float[2, 3, 2] z, float[2, 2, 3] w) {
            list = SequenceConstruct(x, y)
            z = ConcatFromSequence<axis = -1, new_axis = 1>(list)
            w = ConcatFromSequence<axis = 1, new_axis = 1>(list)
        }""",
    "split by one size": """
        four (float[2, 3] x, float[2, 3] y) => (float[2, 2] z, float[2, 1] w) {
            two = Constant<value_int = 2>()
            zero = Constant<value_int = 0>()
            one = Constant<value_int = 1>()
            list = SplitToSequence<axis = 1>(x, two)
            z = SequenceAt(list, zero)
            w = SequenceAt(list, one)
        }""",
    "split by sizes": """
        five (float[2, 3] x, float[2, 3] y) => (float[1, 3] z) {
            sizes = Constant<value_ints = [1, 1]>()
            one = Constant<value_int = 1>()
            list = SplitToSequence(y, sizes)
            z = SequenceAt(list, one)
        }""",
    "split into slices": """
        six (float[2, 3] x, float[2, 3] y) => (float[2] z) {
            one = Constant<value_int = 1>()
            list = SplitToSequence<axis = 1, keepdims = 0>(x)
            z = SequenceAt(list, one)
        }""",
    "optional": """
        seven (float[2, 3] x, float[2, 3] y) => (float[2, 3] z, bool has) {
            wrapped = Optional(x)
            has = OptionalHasElement(wrapped)
            z = OptionalGetElement(wrapped)
        }""",
    "map": """
        eight (float[2, 3] x, float[2, 3] y) => (float[2, 3] z) {
            list = SequenceConstruct(x, y)
            sums = SequenceMap(list, y) <body = add (float[2, 3] a, float[2, 3] b) =>
                (float[2, 3] c) { c = Add(a, b) }>
            zero = Constant<value_int = 0>()
            z = SequenceAt(sums, zero)
        }""",
}


def parsed(text):
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text))


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "map"])
def test_sequence(name):
    model = parsed(GRAPHS[name])
    x, y = floats(2, 3), floats(2, 3, seed=1)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    wanted = session.run(None, {"x": x, "y": y})
    got = run_lowered(lower_model(model), [x, y])
    for left, right in zip(got, wanted, strict=True):
        assert_same(left, np.asarray(right), 1e-6)


def test_a_run_time_position_is_refused():
    model = parsed("""
        nine (float[2] x, int64 i) => (float[2] y) {
            list = SequenceConstruct(x, x)
            y = SequenceAt(list, i)
        }""")
    with pytest.raises(UnsupportedError, match="must be known at compile time"):
        lower_model(model)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("list = SequenceConstruct(x) y = Neg(list)", "a sequence"),
        ("y = SequenceConstruct(x)", "a sequence"),
        ("none = SequenceEmpty() y = ConcatFromSequence<axis = 0>(none)", "empty sequence"),
        (
            "i = Constant<value_int = 1>() l = SequenceConstruct(x) y = SequenceAt(l, i)",
            "position 1",
        ),
    ],
)
def test_refusals(text, reason):
    model = onnx.parser.parse_model(f"{HEADER} ten (float[2] x) => (y) {{ {text} }}")
    with pytest.raises(UnsupportedError, match=reason):
        lower_model(model)
