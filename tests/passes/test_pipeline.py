import numpy as np
import onnx_ir as ir
import pytest
from hybridc.passes import pipeline
from onnx import TensorProto, helper

from tests.models import branched_model, make_model, node, random, relu_model, sum_model
from tests.passes.harness import assert_same_results, interface, operators, run_all


def with_function():
    """A model that calls a function of its own."""
    body = [node("Neg", "a", "n"), node("Relu", "n", "b")]
    opset = helper.make_opsetid("", 17)
    function = helper.make_function("own", "NegRelu", ["a"], ["b"], body, [opset])
    call = helper.make_node("NegRelu", ["x"], ["y"], domain="own", name="call")
    model = make_model([call], {"x": (4,)}, {"y": (4,)})
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.functions.append(function)
    return model


def with_constants():
    nodes = [
        node("Constant", "", "two", value_float=2.0),
        node("Constant", "", "shape", value_ints=[3, 2]),
        node("Mul", "x two", "m"),
        node("Identity", "m", "i"),
        node("Reshape", "i shape", "y"),
        node("Relu", "m", "unused"),
    ]
    return make_model(nodes, {"x": (2, 3)}, {"y": (3, 2)})


def with_constant_output():
    nodes = [node("Constant", "", "c", value_floats=[1.0, 2.0]), node("Identity", "c", "z")]
    return make_model([*nodes, node("Relu", "x", "y")], {"x": (2,)}, {"y": (2,), "z": (2,)})


def with_input_as_output():
    nodes = [node("Identity", "x", "y"), node("Identity", "x", "z")]
    return make_model(nodes, {"x": (2,)}, {"y": (2,), "z": (2,)})


def with_old_initializers():
    model = branched_model()
    for tensor in model.graph.initializer:
        info = helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims)
        model.graph.input.append(info)
    return model


def zeros(model):
    """Random inputs of a model with static shapes."""
    given = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: random(*(dim.dim_value for dim in value.type.tensor_type.shape.dim))
        for value in model.graph.input
        if value.name not in given
    }


MODELS = {
    "relu": (relu_model, ["Relu"]),
    "branched": (branched_model, None),
    "function": (with_function, ["Neg", "Relu"]),
    "constants": (with_constants, ["Mul", "Reshape"]),
    "constant output": (with_constant_output, None),
    "input as output": (with_input_as_output, None),
    "old initializers": (with_old_initializers, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_interface_and_the_results_stay(name):
    make, expected = MODELS[name]
    model = make()
    after, notes = run_all(model)
    proto = ir.to_proto(after)
    names = [value.name for value in proto.graph.input]
    assert names == list(zeros(model))
    assert interface(proto)[1] == interface(model)[1]
    assert notes == []
    assert expected is None or operators(after) == expected
    assert_same_results(model, after, zeros(model))


@pytest.mark.parametrize("make", [branched_model, sum_model])
def test_every_node_has_a_name_and_every_value_a_shape(make):
    after, _ = run_all(make())
    nodes = list(after.graph)
    assert len({n.name for n in nodes}) == len(nodes)
    assert all(n.name for n in nodes)
    assert all(value.shape is not None for n in nodes for value in n.outputs)


def test_shapes_from_before_specialization_are_forgotten():
    model = sum_model()
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 9
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 3
    after, _ = run_all(model)
    assert after.graph.outputs[0].shape == (3, 4)


def test_weights_are_not_copied_into_nodes():
    after, _ = run_all(branched_model())
    assert "Constant" not in operators(after)
    total = sum(v.const_value.nbytes for v in after.graph.initializers.values())
    assert total == sum(np.prod(t.dims) * 4 for t in branched_model().graph.initializer)


class RenameAndFail(ir.passes.InPlacePass):
    """Fails in the middle of its work."""

    def call(self, model):
        for each in model.graph:
            each.op_type = "Neg"
        raise RuntimeError("no more")


class DoNothing(ir.passes.InPlacePass):
    def call(self, model):
        return ir.passes.PassResult(model, modified=False)


class ToAbs(ir.passes.InPlacePass):
    def call(self, model):
        for each in model.graph:
            each.op_type = "Abs"
        return ir.passes.PassResult(model, modified=True)


@pytest.mark.parametrize(
    ("between", "expected"), [([DoNothing], "Relu"), ([DoNothing, ToAbs, DoNothing], "Abs")]
)
def test_what_a_failed_step_did_is_undone(monkeypatch, between, expected):
    """Back to the model as the steps before left it, and again for the next one that fails."""
    passes = [*between, RenameAndFail, DoNothing, RenameAndFail]
    steps = [pipeline.Step(made.__name__, made, optional=made is not ToAbs) for made in passes]
    monkeypatch.setattr(pipeline, "make_steps", lambda *_arguments: steps)
    after, notes = run_all(relu_model())
    assert operators(after) == [expected]
    assert notes == ["step 'RenameAndFail' was left out: no more"] * 2
