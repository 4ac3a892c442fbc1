import numpy as np
import pytest
from hybridc.passes.split_transposed_convolutions import SplitTransposedConvolutions
from onnx.shape_inference import infer_shapes

from tests.models import make_model, node, random
from tests.passes.harness import apply, assert_same_results, operators

LINE = ["Conv", "Reshape", "Transpose", "Reshape"]


def check(expected, dims, kernel, out=3, bias=True, opset=18, after=(), inputs=None, **attributes):
    """A transposed convolution, the nodes ``after`` it that read ``t``, and the output ``y``."""
    rank = len(dims)
    target = "t" if after else "y"
    names = "x w b" if bias else "x w"
    nodes = [node("ConvTranspose", names, target, **attributes), *after]
    groups = attributes.get("group", 1)
    weights = {"w": random(dims[1], out, *kernel), "b": random(out * groups, seed=1)}
    used = {name: weights[name] for name in names.split()[1:]}
    outputs = {"y": (None,) * rank}
    model = infer_shapes(make_model(nodes, {"x": inputs or dims}, outputs, used, opset=opset))
    result = apply(SplitTransposedConvolutions(), model)
    assert operators(result) == expected
    assert_same_results(model, result, {"x": random(*dims, seed=2)})
    return result


@pytest.mark.parametrize("bias", [True, False])
def test_kernel_as_large_as_the_stride(bias):
    after = check(["Conv", "DepthToSpace"], (2, 4, 5, 7), (2, 2), bias=bias, strides=[2, 2])
    (weight,) = (value for name, value in after.graph.initializers.items() if "weight" in name)
    assert weight.shape == (12, 4, 1, 1)


@pytest.mark.parametrize(
    ("kernel", "stride", "pads", "added"),
    [
        ((4, 4), 2, [1, 1, 1, 1], [0, 0]),
        ((4, 6), 2, [1, 2, 1, 2], [1, 0]),
        ((2, 4), 2, [0, 0, 1, 3], [0, 0]),
        ((3, 9), 3, [2, 1, 0, 1], [0, 1]),
        ((4, 4), 4, [3, 0, 2, 4], [0, 3]),
    ],
)
def test_pads_are_cut_off(kernel, stride, pads, added):
    expected = ["Conv", "DepthToSpace", "Slice"]
    settings = {"strides": [stride] * 2, "pads": pads, "output_padding": added}
    check(expected, (1, 3, 4, 5), kernel, **settings)


@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 2, 1], [2, 2, 2, 2]])
def test_stride_of_one_is_a_convolution_with_other_pads(pads):
    check(["Conv"], (2, 3, 5, 6), (3, 3), pads=pads)
    check(["Conv"], (2, 3, 5, 6), (3, 3), pads=pads, strides=[1, 1])


def test_one_axis():
    check(LINE, (2, 3, 9), (8,), strides=[4])
    check([*LINE, "Slice"], (2, 3, 9), (8,), strides=[4], pads=[2, 2])


@pytest.mark.parametrize("dims", [("n", 3, 9), (2, 3, "length"), ("n", 3, "length")])
def test_sizes_that_only_running_tells(dims):
    check([*LINE, "Slice"], (2, 3, 9), (4,), strides=[2], pads=[1, 1], inputs=dims)
    expected, shape = ["Conv", "DepthToSpace", "Slice"], (*dims, dims[2])
    check(expected, (2, 3, 9, 9), (4, 4), strides=[2, 2], pads=[1] * 4, inputs=shape)


def test_what_follows_element_by_element_is_moved_in_front():
    after = (node("LeakyRelu", "t", "u", alpha=0.3), node("Sigmoid", "u", "y"))
    expected = ["Conv", "LeakyRelu", "Sigmoid", "DepthToSpace"]
    check(expected, (1, 4, 5, 5), (2, 2), after=after, strides=[2, 2])


def test_what_is_read_twice_is_not():
    after = (node("Relu", "t", "u"), node("Add", "t u", "y"))
    expected = ["Conv", "DepthToSpace", "Relu", "Add"]
    check(expected, (1, 4, 5, 5), (2, 2), after=after, strides=[2, 2])


@pytest.mark.parametrize(
    ("kernel", "attributes"),
    [
        ((1, 3), {"strides": [2, 2]}),
        ((2, 4), {"strides": [2, 4]}),
        ((2, 2), {"strides": [2, 2], "dilations": [2, 2]}),
        ((2, 2), {"strides": [2, 2], "group": 2}),
        ((2, 2), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ((2, 2), {"strides": [2, 2], "output_shape": [9, 9]}),
        ((2, 2), {"strides": [2, 2], "output_padding": [1, 1]}),
        ((2, 2), {"pads": [2, 0, 0, 0]}),
    ],
    ids=str,
)
def test_others_stay(kernel, attributes):
    check(["ConvTranspose"], (1, 4, 5, 5), kernel, **attributes)


@pytest.mark.parametrize(("opset", "expected"), [(9, "ConvTranspose"), (10, "Conv")])
def test_opsets(opset, expected):
    spread = ["DepthToSpace"] * (expected == "Conv")
    check([expected, *spread], (1, 4, 5, 5), (2, 2), strides=[2, 2], opset=opset)


@pytest.mark.parametrize(
    ("kernel", "stride", "pads", "added"),
    [
        ((3, 3), 2, [0, 0, 0, 0], [0, 0]),
        ((3, 3), 2, [1, 1, 1, 1], [1, 1]),
        ((3, 5), 2, [1, 2, 0, 1], [0, 1]),
        ((4, 5), 3, [0, 3, 1, 2], [0, 1]),
        ((2, 3), 2, [0, 0, 1, 0], [0, 1]),
    ],
)
def test_phases_of_different_taps(kernel, stride, pads, added):
    expected = ["Conv"] * stride**2 + ["Concat", "DepthToSpace", "Slice"]
    settings = {"strides": [stride] * 2, "pads": pads, "output_padding": added}
    after = check(expected, (1, 3, 4, 5), kernel, **settings)
    weights = [v for name, v in after.graph.initializers.items() if "weight" in name]
    assert sum(np.prod(v.shape) for v in weights) == 9 * np.prod(kernel)


def test_phases_of_one_axis():
    check(["Conv"] * 3 + ["Concat", *LINE[1:], "Slice"], (2, 3, 9), (7,), strides=[3], pads=[2, 2])


@pytest.mark.parametrize("size", [3, 4])
def test_infinity_stays_where_it_was(size):
    weights = {"w": random(1, 1, size, size)}
    nodes = [node("ConvTranspose", "x w", "y", strides=[2, 2], pads=[1, 1, 1, 1])]
    model = make_model(nodes, {"x": (1, 1, 4, 4)}, {"y": (None,) * 4}, weights)
    model = infer_shapes(model)
    x = random(1, 1, 4, 4)
    x[0, 0, 1, 2] = np.inf
    assert_same_results(model, apply(SplitTransposedConvolutions(), model), {"x": x})
