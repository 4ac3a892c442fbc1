"""Models of an old format, where every initializer had to be an input, too."""

import onnx
import onnx_ir as ir
import pytest
from hybridc.passes.close_interface import CloseInterface
from onnx import helper

from tests.models import make_model, node, random
from tests.passes.harness import assert_same_results, run_all


def old_model(ir_version):
    weights = {"w": random(3, 4)}
    nodes = [node("MatMul", "x w", "m"), node("Identity", "m", "y")]
    model = make_model(nodes, {"x": (2, 3)}, {"y": (2, 4)}, weights, opset=9)
    model.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, (3, 4)))
    model.ir_version = ir_version
    return model


@pytest.mark.parametrize("ir_version", [3, 4, 8])
def test_an_initializer_is_no_input(ir_version):
    """The simplifier takes the model then: nothing is left out."""
    model = old_model(ir_version)
    after, notes = run_all(model)
    assert not notes
    assert [value.name for value in after.graph.inputs] == ["x"]
    assert_same_results(model, after, {"x": random(2, 3)})


@pytest.mark.parametrize(("before", "after"), [(3, 4), (4, 4), (8, 8)])
def test_the_version_is_raised_only_where_it_must_be(before, after):
    result = CloseInterface()(ir.from_proto(old_model(before)))
    assert result.modified
    assert result.model.ir_version == after
