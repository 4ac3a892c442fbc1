import onnx
import onnx_ir as ir
from hybridc.passes.drop_stale_shapes import DropStaleShapes
from hybridc.passes.infer_shapes import InferShapes
from onnx import helper

from tests.models import make_model, node, random
from tests.passes.harness import apply, run_all


def chain(outer):
    nodes = [node("Relu", "x", "middle"), node("Neg", "middle", "y")]
    model = make_model(nodes, {"x": (2, 3)}, {"y": outer})
    return onnx.shape_inference.infer_shapes(model)


def test_inner_shapes_go_and_ranks_of_outputs_stay():
    graph = apply(DropStaleShapes(), chain((2, 3))).graph
    middle, output = (n.outputs[0] for n in graph)
    assert middle.shape is None
    assert middle.dtype == ir.DataType.FLOAT
    assert len(output.shape) == 2
    assert not output.shape.is_static()
    assert graph.inputs[0].shape == (2, 3)


def test_shapes_come_back_for_a_new_input_shape():
    model = ir.from_proto(chain((2, 3)))
    model.graph.inputs[0].shape = ir.Shape([5, 3])
    InferShapes()(DropStaleShapes()(model).model)
    assert [n.outputs[0].shape for n in model.graph] == [(5, 3), (5, 3)]


def test_says_whether_it_did_anything():
    nodes = [node("Relu", "x", "middle"), node("Neg", "middle", "y")]
    assert DropStaleShapes()(ir.from_proto(chain((2, 3)))).modified
    model = ir.from_proto(make_model(nodes, {"x": (2,)}, {"y": (2,)}))
    model.graph.outputs[0].shape = None
    assert not DropStaleShapes()(model).modified


def test_shapes_in_functions_go_too():
    """A function's body may say shapes; it is put where it is called with others."""
    body = [node("Relu", "a", "middle"), node("Neg", "middle", "b")]
    function = helper.make_function("own", "F", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    function.value_info.append(helper.make_tensor_value_info("middle", 1, (7, 7)))
    call = helper.make_node("F", ["x"], ["y"], domain="own")
    model = make_model([call], {"x": (2, 3)}, {"y": (2, 3)})
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.ir_version = 10
    after, notes = run_all(model)
    assert not notes
    assert all(value.shape == (2, 3) for n in after.graph for value in n.outputs)


def test_an_initializer_has_the_shape_of_its_contents():
    model = make_model([node("Add", "x w", "y")], {"x": (2, 3)}, {"y": (2, 3)}, {"w": random(3)})
    model.graph.value_info.append(helper.make_tensor_value_info("w", 1, (2, 3)))
    assert apply(DropStaleShapes(), model).graph.initializers["w"].shape == (3,)
