import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes.infer_shapes import InferShapes

from tests.models import branched_model, make_model, node, random
from tests.passes.harness import apply, assert_same_results


def shapes(model):
    return {value.name: value.shape for n in model.graph for value in n.outputs}


def test_every_value_gets_its_shape():
    after = shapes(apply(InferShapes(), branched_model()))
    assert after["stem.y"] == (1, 4, 8, 8)
    assert after["pooled"] == (1, 4, 1, 1)
    assert after["y"] == (1, 5)


def test_shapes_that_are_computed():
    """Values of shape computations are followed into Reshape."""
    nodes = [
        node("Shape", "x", "s", start=0, end=1),
        node("Concat", "s rest", "target", axis=0),
        node("Reshape", "x target", "y"),
    ]
    model = make_model(nodes, {"x": (2, 3, 4)}, {"y": (None, None)}, {"rest": np.array([-1])})
    assert shapes(apply(InferShapes(), model))["y"] == (2, 12)


def test_dynamic_dimensions_keep_their_names():
    nodes = [node("Relu", "x", "m"), node("Neg", "m", "y")]
    after = shapes(apply(InferShapes(), make_model(nodes, {"x": ("n", 3)}, {"y": ("n", 3)})))
    assert after["m"] == ir.Shape(["n", 3])


def test_the_default_of_onesided_is_taken_for_what_it_is():
    """ONNX's inference takes 0, the standard says 1; what follows would be dropped or merged."""
    weights = {"step": np.array(8), "window": np.ones(16, "f"), "shape": np.array([1, 15, 18])}
    nodes = [node("STFT", "x step window", "bins"), node("Reshape", "bins shape", "y")]
    model = make_model(nodes, {"x": (1, 128, 1)}, {"y": (1, 15, 18)}, weights)
    after = apply(InferShapes(), model)
    assert shapes(after)["bins"] == (1, 15, 9, 2)
    assert_same_results(model, after, {"x": random(1, 128, 1)})


@pytest.mark.parametrize("operator", ["SequenceEmpty", "SequenceConstruct", "SplitToSequence"])
def test_sequences_are_no_tensors(operator):
    maker = {"SequenceEmpty": "", "SequenceConstruct": "x x", "SplitToSequence": "x"}[operator]
    nodes = [
        node(operator, maker, "list"),
        node("Identity", "list", "same"),
        node("SequenceInsert", "same x", "longer"),
        node("ConcatFromSequence", "longer", "y", axis=0),
    ]
    after = apply(InferShapes(), make_model(nodes, {"x": (2, 3)}, {"y": (None, 3)}))
    types = {value.name: value.type for n in after.graph for value in n.outputs}
    sequence = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    assert [types[name] for name in ("list", "same", "longer")] == [sequence] * 3
    assert shapes(after)["list"] is None
    assert types["y"] == ir.TensorType(ir.DataType.FLOAT)


def test_no_dimension_is_negative():
    """Equal parts of 5 in 4 would be 2, 2, 2 and -1: such a Split cannot run."""
    model = make_model(
        [node("Split", "x", "a b c d", num_outputs=4)],
        {"x": (5,)},
        dict.fromkeys("abcd", (None,)),
        opset=18,
    )
    sizes = [dim for shape in shapes(apply(InferShapes(), model)).values() for dim in shape]
    assert all(isinstance(dim, ir.SymbolicDim) or dim > 0 for dim in sizes)


def test_large_weights_do_not_travel():
    """Inference sees what may be a size or an axis; the rest keeps its contents and its place."""
    weights = {"w": random(40, 40), "shape": np.array([4, 10])}
    nodes = [node("MatMul", "x w", "m"), node("Reshape", "m shape", "y")]
    model = make_model(nodes, {"x": (1, 40)}, {"y": (4, 10)}, weights)
    after = apply(InferShapes(), model)
    assert shapes(after) == {"m": (1, 40), "y": (4, 10)}
    assert np.array_equal(after.graph.initializers["w"].const_value.numpy(), weights["w"])
    assert_same_results(model, after, {"x": random(1, 40)})


def test_what_a_model_says_of_its_outputs_is_not_believed():
    """Neither a size nor a rank."""
    nodes = [node("Relu", "x", "m"), node("Neg", "m", "y")]
    for wrong in ((5, 3), (2, 3, 1), ()):
        model = make_model(nodes, {"x": (2, 3)}, {"y": wrong})
        assert shapes(InferShapes()(ir.from_proto(model)).model) == {"m": (2, 3), "y": (2, 3)}
