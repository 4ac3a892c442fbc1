"""Hostile models: one clear sentence or the right result, never a crash or an internal error."""

import os
import random as randomness

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import hybridc
from hybridc.errors import ModelError, UserError
from hybridc.frontend.read import read_model, source_of
from tests.fuzz.contract import try_file, try_model
from tests.fuzz.mutate import mutate, seeds
from tests.models import make_model, node, relu_model, run_reference, save
from tests.support import assert_close, assert_compile_refused, assert_refused, compile_to
from tests.support import hybridc as command


def add_model():
    return make_model([node("Add", "x w", "y")], {"x": (2,)}, {"y": (2,)}, {"w": np.ones(2, "f")})


def pool_model(**attributes):
    return make_model(
        [node("MaxPool", "x", "y", "pool", **attributes)], {"x": (1, 1, 4, 4)}, {"y": (1, 1, 3, 3)}
    )


def changed_weight(**fields):
    model = add_model()
    tensor = model.graph.initializer[0]
    for name, value in fields.items():
        if isinstance(value, list):
            del getattr(tensor, name)[:]
            getattr(tensor, name).extend(value)
        else:
            setattr(tensor, name, value)
    return model


def typed(code):
    model = relu_model()
    model.graph.input[0].type.tensor_type.elem_type = code
    return model


def sparse():
    model = add_model()
    values = numpy_helper.from_array(np.ones(1, "f"), "w")
    places = numpy_helper.from_array(np.array([77]), "places")
    del model.graph.initializer[:]
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [2]))
    return model


def calling(*bodies):
    """A model that calls the first of the functions F0, F1, ... with these bodies."""
    model = make_model([], {"x": (2,)}, {"y": (2,)})
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    for index, body in enumerate(bodies):
        function = helper.make_function("local", f"F{index}", ["a"], ["b"], body, opsets)
        model.functions.append(function)
    model.graph.node.append(helper.make_node("F0", ["x"], ["y"], domain="local"))
    model.opset_import.append(opsets[1])
    return model


def call(name, source, result):
    return helper.make_node(name, [source], [result], domain="local")


def doubling(count):
    bodies = [[call(f"F{i + 1}", "a", "t"), call(f"F{i + 1}", "t", "b")] for i in range(count)]
    return calling(*bodies, [node("Relu", "a", "b")])


REFUSED = {
    "dim 2**62": (lambda: relu_model((2**62,)), "larger than any memory"),
    "product": (lambda: relu_model((2**32, 2**32)), "larger than any memory"),
    "rank": (lambda: relu_model((1,) * 70), "more than 32 dimensions"),
    "type 999": (lambda: typed(999), "unknown element type 999"),
    "type -5": (lambda: typed(-5), "unknown element type -5"),
    "no type": (lambda: typed(0), "unknown element type 0"),
    "bytes short": (lambda: changed_weight(raw_data=b"123"), "3 bytes where its shape needs 8"),
    "bytes long": (lambda: changed_weight(raw_data=b"1" * 99), "99 bytes where its shape needs 8"),
    "weight type": (lambda: changed_weight(data_type=99), "unknown element type 99"),
    "weight dims": (lambda: changed_weight(dims=[-2]), "negative dimension"),
    "weight huge": (lambda: changed_weight(dims=[2**33, 2**33]), "has 295147905179352825856 bytes"),
    "sparse": (sparse, "is sparse"),
    "stride 0": (lambda: pool_model(kernel_shape=[2, 2], strides=[0, 0]), "'strides' is [0, 0]"),
    "kernel": (lambda: pool_model(kernel_shape=[2**62, 2]), "'kernel_shape'"),
    "dilation": (lambda: pool_model(kernel_shape=[2, 2], dilations=[-1, 1]), "'dilations'"),
    "pads": (lambda: pool_model(kernel_shape=[2, 2], pads=[2**62] * 4), "'pads'"),
    "recursion": (lambda: calling([call("F0", "a", "b")]), "must not be recursive"),
    "mutual": (
        lambda: calling([call("F1", "a", "b")], [call("F0", "a", "b")]),
        "must not be recursive",
    ),
    "exponential": (lambda: doubling(29), "expand to"),
    "deep calls": (
        lambda: calling(
            *[[call(f"F{i + 1}", "a", "b")] for i in range(99)], [node("Abs", "a", "b")]
        ),
        "call each other more than",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path, name):
    make, words = REFUSED[name]
    assert_compile_refused(save(make(), tmp_path / "m.onnx"), tmp_path, 3, words)


@pytest.mark.parametrize("kind", ["fifo", "device", "archive"])
def test_no_model_file(tmp_path, kind):
    path = tmp_path / "m.onnx"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"PK\x03\x04" + bytes(100))
    outcome = command("compile", path, "-o", tmp_path / "b")
    assert_refused(outcome, 3 if kind == "archive" else 2, "m.onnx")


def with_outputs(*names):
    model = add_model()
    del model.graph.output[:]
    for name in names:
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,)))
    return model


@pytest.mark.parametrize("names", [("x",), ("w",), ("y", "x", "w"), ("w", "y"), ()])
def test_outputs_that_no_node_computes(tmp_path, names):
    model = with_outputs(*names)
    compile_to(tmp_path / "b.hyb", model)
    inputs = {"x": np.array([1, -2], "f")}
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        right = {"x": inputs["x"], "w": np.ones(2, "f"), "y": inputs["x"] + 1}
        assert_close(loaded.run(inputs), {name: right[name] for name in names})


@pytest.mark.parametrize(
    "names",
    [["w/1", "w.1", "w_1", "w 1"], ["-", "\n", "é😀", "n" * 10_000], ["../x", "%s", "{}", "\\"]],
)
def test_clashing_and_strange_names(tmp_path, names):
    weights = {name: np.full((40, 2), index + 1, "f") for index, name in enumerate(names)}
    nodes, last = [], "x"
    for index, name in enumerate(names):
        result = "y" if index + 1 == len(names) else f"{name}/out"
        nodes.append(helper.make_node("Sub", [last, name], [result], name="same"))
        last = result
    model = make_model(nodes, {"x": (40, 2)}, {"y": (40, 2)}, weights)
    compile_to(tmp_path / "b.hyb", model)
    x = np.ones((40, 2), "f")
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        np.testing.assert_array_equal(loaded(x=x)["y"], x - 10)


def test_declared_types_that_are_wrong_are_inferred_anew(tmp_path):
    model = make_model([node("Relu", "x", "a"), node("Neg", "a", "y")], {"x": (2,)}, {"y": (2,)})
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.INT8, (9, 9)))
    compile_to(tmp_path / "b.hyb", model)
    inputs = {"x": np.array([1, -2], "f")}
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        np.testing.assert_array_equal(loaded.run(inputs)["y"], [-1, 0])


def test_very_many_operands(tmp_path):
    names = [f"v{index}" for index in range(1000)]
    nodes = [helper.make_node("Neg", ["x"], [name]) for name in names]
    nodes.append(helper.make_node("Sum", names, ["y"]))
    compile_to(tmp_path / "b.hyb", make_model(nodes, {"x": (2,)}, {"y": (2,)}))
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        np.testing.assert_allclose(loaded(x=np.array([1, 2], "f"))["y"], [-1000, -2000])


def test_a_long_vector_is_no_shape():
    """Inference must not carry along one object per sample of a sound."""
    model = make_model([node("Mul", "x x", "y")], {"x": (2**31,)}, {"y": (2**31,)})
    assert try_model(model) == "lowered"


@pytest.mark.parametrize("sizes", [[2**40], [2**18, 2**17], [-4]])
def test_constants_of_absurd_size(sizes):
    nodes = [
        node("ConstantOfShape", "s", "a"),
        node("ReduceSum", "a", "t", keepdims=0),
        node("Add", "x t", "y"),
    ]
    model = make_model(nodes, {"x": (2,)}, {"y": (2,)}, {"s": np.array(sizes)})
    assert try_model(model) == "UnsupportedError"


@pytest.mark.parametrize("code", [TensorProto.COMPLEX64, TensorProto.COMPLEX128])
@pytest.mark.parametrize("operator", ["Identity", "Shape", "Size", "Cast"])
def test_complex_numbers_are_carried_or_refused(operator, code):
    result = TensorProto.INT64 if operator in ("Shape", "Size") else code
    result = TensorProto.FLOAT if operator == "Cast" else result
    attributes = {"to": TensorProto.FLOAT} if operator == "Cast" else {}
    model = make_model([node(operator, "x", "y", **attributes)], {"x": (2,)}, {"y": (2,)}, opset=23)
    model.graph.input[0].type.tensor_type.elem_type = code
    model.graph.output[0].type.tensor_type.elem_type = result
    if operator in ("Shape", "Size"):
        model.graph.output[0].type.tensor_type.ClearField("shape")
        assert try_model(model) == "lowered"
    else:
        assert try_model(model) == "UnsupportedError"


def test_nesting_beyond_the_format():
    """Protobuf itself refuses messages that nest deeper than a hundred levels."""
    with pytest.raises(ModelError):
        source_of(calling(*[[call(f"F{i + 1}", "a", "b")] for i in range(80)]))


class Seeded:
    """Choices out of a seeded generator."""

    def __init__(self, seed):
        self._random = randomness.Random(seed)

    def below(self, count):
        return self._random.randrange(count) if count > 1 else 0

    def blob(self, count):
        return self._random.randbytes(count)


@pytest.mark.parametrize("number", range(len(seeds())))
def test_mutated_models(number):
    model = seeds()[number]
    for seed in range(20):
        choices = Seeded(1000 * number + seed)
        assert try_model(mutate(model, choices, 1 + choices.below(5)))


@pytest.mark.parametrize("number", range(len(seeds())))
def test_flipped_bytes(tmp_path, number):
    content = seeds()[number].SerializeToString()
    path = tmp_path / "m.onnx"
    for seed in range(20):
        choices = Seeded(seed)
        damaged = bytearray(content)
        for _ in range(1 + choices.below(3)):
            damaged[choices.below(len(damaged))] ^= 1 << choices.below(8)
        path.write_bytes(damaged)
        assert try_file(path)


def test_seeds_are_valid():
    for model in seeds():
        onnx.checker.check_model(model)


def test_external_length_beyond_the_file(tmp_path):
    path = save(add_model(), tmp_path / "m.onnx", external=True)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(UserError, match="too short"):
        read_model(path)


def texts_of(message):
    """The strings of a message and of all inside of it."""
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        for each in values:
            if field.type == field.TYPE_MESSAGE:
                yield from texts_of(each)
            elif field.type == field.TYPE_STRING:
                yield each


def remarked_model():
    """A model that has every remark."""
    model = relu_model()
    model.producer_name = model.producer_version = "version"
    model.doc_string = model.graph.node[0].doc_string = model.graph.input[0].doc_string = "remark"
    model.metadata_props.add(key="license", value="none")
    model.graph.node[0].metadata_props.add(key="place", value="line 7")
    return model


@pytest.mark.parametrize("number", range(len(seeds())))
def test_names_that_are_no_text(tmp_path, number):
    content = seeds()[number].SerializeToString()
    for text in {text for text in texts_of(seeds()[number]) if text}:
        path = tmp_path / "model.onnx"
        path.write_bytes(content.replace(text.encode(), b"\x8a" + text.encode()[1:]))
        assert try_file(path) == "ModelError", text


@pytest.mark.parametrize("remark", ["version", "remark", "license", "none", "place", "line 7"])
def test_remarks_that_are_no_text_are_dropped(tmp_path, remark):
    content = remarked_model().SerializeToString()
    damaged = content.replace(remark.encode(), b"\x8a" + remark.encode()[1:])
    assert damaged != content
    (tmp_path / "model.onnx").write_bytes(damaged)
    assert try_file(tmp_path / "model.onnx") == "lowered"


def test_a_valid_model_still_gives_its_result(tmp_path):
    compile_to(tmp_path / "b.hyb", add_model())
    inputs = {"x": np.array([1, -2], "f")}
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        assert_close(loaded.run(inputs), run_reference(add_model(), inputs))
