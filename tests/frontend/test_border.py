"""Types at the border of a model, in ONNX's words, whatever they are made of."""

import onnx
import pytest
from onnx import TensorProto, TypeProto, helper

from hybridc.frontend.border import border_types, type_text
from tests.support import hybridc


def opaque(domain="", name="thing"):
    return TypeProto(opaque_type=TypeProto.Opaque(domain=domain, name=name))


TYPES = {
    "": TypeProto(),
    "tensor(float)": helper.make_tensor_type_proto(TensorProto.FLOAT, [2]),
    "tensor(string)": helper.make_tensor_type_proto(TensorProto.STRING, None),
    "sparse_tensor(int64)": helper.make_sparse_tensor_type_proto(TensorProto.INT64, [2]),
    "seq(tensor(float))": helper.make_sequence_type_proto(
        helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    ),
    "optional(seq(opaque(a,thing)))": helper.make_optional_type_proto(
        helper.make_sequence_type_proto(opaque("a"))
    ),
    "map(string,opaque(,thing))": helper.make_map_type_proto(TensorProto.STRING, opaque()),
    "opaque(a,b)": opaque("a", "b"),
}


@pytest.mark.parametrize("text", TYPES)
def test_text(text):
    assert type_text(TYPES[text]) == text


def test_what_is_no_tensor_of_numbers():
    values = [onnx.ValueInfoProto(name=text, type=kind) for text, kind in TYPES.items()]
    model = helper.make_model(helper.make_graph([], "g", values, []))
    assert border_types(model) == {text: text for text in TYPES if text[:8] not in ("", "tensor(f")}


@pytest.mark.parametrize("kind", [opaque(), helper.make_sequence_type_proto(opaque())])
def test_an_opaque_input_is_refused(tmp_path, kind):
    values = [onnx.ValueInfoProto(name=name, type=kind) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", "x", "y")], "g", *([v] for v in values))
    opset = [helper.make_opsetid("", 17)]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    assert hybridc("compile", path, "-o", tmp_path / "b").code == 3
