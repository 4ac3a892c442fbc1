"""Damage to ONNX models: what a random number generator, or a fuzzer's bytes, choose.

A mutation picks one message of the model's tree, one of its fields, and changes it: a number
becomes an extreme or a neighbour, a name becomes that of something else in the model, an element
is dropped, doubled or moved. So most mutants still parse, and many are almost valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import TensorProto, helper, numpy_helper

from tests.models import branched_model, make_model, node, random, relu_model, sum_model

NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    16,
    255,
    2**31 - 1,
    2**31,
    -(2**31),
    2**40,
    2**62,
    -(2**63),
    2**63 - 1,
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "x",
    "y",
    "a/b",
    "\n",
    "é",
    "ai.onnx",
    "com.microsoft",
    "NOTSET",
    "SAME_UPPER",
    "x" * 999,
)


class Choices(Protocol):
    """Where decisions come from; ``random.Random`` with these two methods, or a fuzzer's bytes."""

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``."""

    def blob(self, count: int) -> bytes:
        """Up to ``count`` bytes."""


def mutate(model: onnx.ModelProto, choices: Choices, times: int) -> onnx.ModelProto:
    """A copy of a model with this many changes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for _ in range(times):
        _change_once(copy, choices)
    return copy


def _change_once(model: onnx.ModelProto, choices: Choices) -> None:
    messages = list(_messages(model))
    message = messages[choices.below(len(messages))]
    fields = list(message.DESCRIPTOR.fields)
    given = [field for field, _ in message.ListFields()]
    chosen = given if given and choices.below(8) else fields  # mostly what is there already
    field = chosen[choices.below(len(chosen))]
    try:
        if field.is_repeated:
            _change_repeated(message, field, choices, model)
        elif not choices.below(6):
            message.ClearField(field.name)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).SetInParent()
        else:
            setattr(
                message, field.name, _value(field, getattr(message, field.name), choices, model)
            )
    except (ValueError, TypeError):  # protobuf refuses what cannot be written to a file
        return


def _messages(message: Message) -> Any:
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from _messages(inner)


def _change_repeated(
    message: Message, field: FieldDescriptor, choices: Choices, model: onnx.ModelProto
) -> None:
    items = getattr(message, field.name)
    action = choices.below(4)
    index = choices.below(len(items)) if len(items) else 0
    if action == 0 and len(items):
        del items[index]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if len(items):
            items.append(items[index])
        else:
            items.add()
    elif action == 1 or not len(items):
        items.append(_value(field, items[index] if len(items) else None, choices, model))
    elif action == 2:
        other = choices.below(len(items))
        items[index], items[other] = items[other], items[index]
    else:
        items[index] = _value(field, items[index], choices, model)


def _value(field: FieldDescriptor, old: Any, choices: Choices, model: onnx.ModelProto) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        names = _texts(model)
        return names[choices.below(len(names))]
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _changed_bytes(old or b"", choices)
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return FLOATS[choices.below(len(FLOATS))]
    if field.type == FieldDescriptor.TYPE_ENUM:
        values = list(field.enum_type.values)
        return values[choices.below(len(values))].number
    if not choices.below(3) and isinstance(old, int):
        return old + choices.below(5) - 2
    return NUMBERS[choices.below(len(NUMBERS))]


def _texts(model: onnx.ModelProto) -> Sequence[str]:
    """Names in the model, operators of the standard, and strange texts."""
    names = {name for node_ in model.graph.node for name in (*node_.input, *node_.output)}
    attributes = {a.name for node_ in model.graph.node for a in node_.attribute}
    return [*sorted(names), *sorted(attributes), *OPERATORS, *TEXTS]


def _changed_bytes(old: bytes, choices: Choices) -> bytes:
    action = choices.below(3)
    if action == 0:
        return choices.blob(16)
    position = choices.below(len(old) + 1)
    if action == 1:
        return old[:position]
    return old[:position] + choices.blob(4) + old[position + 4 :]


OPERATORS = """Add Sub Mul Div MatMul Gemm Conv ConvTranspose MaxPool AveragePool Relu
    GlobalAveragePool LeakyRelu Clip Softmax BatchNormalization LayerNormalization Reshape
    InstanceNormalization
    Transpose Concat Split Slice Gather GatherND ScatterND Pad Tile Expand Squeeze Unsqueeze Flatten
    Shape Size ConstantOfShape Range Cast Where Equal Greater Not ReduceSum ReduceMean ArgMax TopK
    Resize Upsample LSTM GRU RNN If Loop Scan Dropout Identity Constant OneHot NonZero Einsum CumSum
    QuantizeLinear DequantizeLinear DepthToSpace SpaceToDepth NonMaxSuppression""".split()


def seeds() -> list[onnx.ModelProto]:
    """Small valid models that together use the format's features."""
    return [make() for make in SEEDS]


def _shapes() -> onnx.ModelProto:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n", axis=0),
        node("Concat", "n rest", "target", axis=0),
        node("Reshape", "x target", "r"),
        node("Slice", "r zero one one", "t"),
        node("Expand", "t target", "e"),
        node("Tile", "e twice", "y"),
    ]
    weights = {
        "zero": np.array([0]),
        "one": np.array([1]),
        "rest": np.array([-1]),
        "twice": np.array([2, 1]),
    }
    return make_model(nodes, {"x": (2, 3, 4)}, {"y": (4, 12)}, weights)


def _branches() -> onnx.ModelProto:
    def branch(operator: str, name: str) -> onnx.GraphProto:
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, (2,))
        return helper.make_graph([node(operator, "x", name)], operator, [], [info])

    choose = node("If", "c", "y", then_branch=branch("Neg", "t"), else_branch=branch("Abs", "e"))
    model = make_model([choose], {"x": (2,)}, {"y": (2,)})
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, ()))
    return model


def _loop() -> onnx.ModelProto:
    def info(name: str, kind: int, dims: tuple[int, ...]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, dims)

    body = helper.make_graph(
        [node("Identity", "go", "on"), node("Mul", "v v", "w")],
        "body",
        [info("i", TensorProto.INT64, ()), info("go", TensorProto.BOOL, ()),
         info("v", TensorProto.FLOAT, (2,))],
        [info("on", TensorProto.BOOL, ()), info("w", TensorProto.FLOAT, (2,))],
    )  # fmt: skip
    nodes = [node("Loop", "n - x", "y", body=body)]
    return make_model(nodes, {"x": (2,)}, {"y": (2,)}, {"n": np.array(3)})


def _function() -> onnx.ModelProto:
    model = make_model([], {"x": (1, 1, 8)}, {"y": (1, 1, 4)})
    pool = node("MaxPool", "a", "b", kernel_shape=[2])
    pool.attribute.add(name="strides", ref_attr_name="step", type=onnx.AttributeProto.INTS)
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(
        helper.make_function("local", "Halve", ["a"], ["b"], [pool], opsets, ["step"])
    )
    model.graph.node.append(helper.make_node("Halve", ["x"], ["y"], domain="local", step=[2]))
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def _recurrent() -> onnx.ModelProto:
    weights = {"w": random(1, 8, 3), "r": random(1, 8, 2, seed=1)}
    nodes = [node("LSTM", "x w r", "a h", hidden_size=2), node("Squeeze", "h axis", "y")]
    weights["axis"] = np.array([0])
    return make_model(nodes, {"x": (4, 1, 3)}, {"y": (1, 2)}, weights)


def _old() -> onnx.ModelProto:
    nodes = [
        node("BatchNormalization", "x s s s s", "a", is_test=1, consumed_inputs=[0, 0, 0, 1, 1]),
        node("Add", "a s", "b", axis=1, broadcast=1),
        node("Pad", "b", "c", paddings=[0, 0, 0, 0, 0, 0, 1, 1]),
        node("Reshape", "c", "y", shape=[1, -1]),
    ]
    model = make_model(nodes, {"x": (1, 3, 4, 4)}, {"y": (1, 75)}, {"s": np.ones(3, "f")}, opset=1)
    model.graph.input.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, (3,)))
    model.ir_version = 3
    return model


def _quantized() -> onnx.ModelProto:
    weights = {"scale": np.float32(0.1), "zero": np.uint8(3), "k": np.array([2])}
    nodes = [
        node("QuantizeLinear", "x scale zero", "q"),
        node("DequantizeLinear", "q scale zero", "d"),
        node("TopK", "d k", "t i", axis=-1),
        node("Cast", "i", "f", to=TensorProto.FLOAT),
        node("Mul", "t f", "y"),
    ]
    return make_model(nodes, {"x": (2, 5)}, {"y": (2, 2)}, weights)


def _constants() -> onnx.ModelProto:
    value = numpy_helper.from_array(np.ones((2, 2), "f"), "v")
    nodes = [
        helper.make_node("Constant", [], ["c"], value=value),
        node("ConstantOfShape", "n", "z"),
        node("Range", "a b d", "r"),
        node("Add", "c z", "m"),
        node("Add", "m r", "k"),
        node("Resize", "x - scales", "u"),
        node("ReduceMax", "u", "v", axes=[0, 1], keepdims=0),
        node("MatMul", "v k", "y"),
    ]
    weights = {
        "n": np.array([2, 2]),
        "a": np.float32(0),
        "b": np.float32(2),
        "d": np.float32(1),
        "scales": np.array([1, 1, 2, 1], "f"),
    }
    return make_model(nodes, {"x": (1, 1, 2, 2)}, {"y": (4, 2)}, weights)


SEEDS: tuple[Callable[[], onnx.ModelProto], ...] = (
    relu_model,
    sum_model,
    branched_model,
    _shapes,
    _branches,
    _loop,
    _function,
    _recurrent,
    _old,
    _quantized,
    _constants,
)
