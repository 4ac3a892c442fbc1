import numpy as np
import onnx_ir as ir
from hybridc.passes.infer_shapes import InferShapes

from tests.models import branched_model, make_model, node
from tests.passes.harness import apply


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
