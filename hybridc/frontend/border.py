"""Types of inputs and outputs that are no tensors of numbers.

Strings, sequences, maps and optionals can only pass through ONNX Runtime, and the compiler need
not know more of them than what to call them. Maps are not even known to the IR: their type is
taken off before a model is turned into it.
"""

from __future__ import annotations

import onnx

STRING = "string"
"""What a manifest calls the element type of a tensor of strings."""


def border_types(model: onnx.ModelProto) -> dict[str, str]:
    """ONNX's text of the type, by name, for inputs and outputs that are no tensors of numbers."""
    values = (*model.graph.input, *model.graph.output)
    texts = {value.name: type_text(value.type) for value in values}
    return {name: text for name, text in texts.items() if text and not _is_numeric(text)}


def forget_maps(model: onnx.ModelProto) -> bool:
    """Take the type off every value that holds a map; returns whether there was one."""
    graph = model.graph
    values = [*graph.input, *graph.output, *graph.value_info]
    found = [value for value in values if "map(" in type_text(value.type)]
    for value in found:
        value.ClearField("type")
    return bool(found)


def type_text(kind: onnx.TypeProto) -> str:
    """A type as ONNX writes it, such as ``seq(map(int64,tensor(float)))``; empty if unknown."""
    field = kind.WhichOneof("value")
    if field is None:
        return ""
    inner = getattr(kind, field)
    if field == "opaque_type":
        return f"opaque({inner.domain},{inner.name})"
    if field == "map_type":
        return f"map({_element(inner.key_type)},{type_text(inner.value_type)})"
    if field in ("sequence_type", "optional_type"):
        return f"{'seq' if field == 'sequence_type' else 'optional'}({type_text(inner.elem_type)})"
    return f"{field.removesuffix('_type')}({_element(inner.elem_type)})"


def _element(code: int) -> str:
    return str(onnx.helper.tensor_dtype_to_string(code)).removeprefix("TensorProto.").lower()


def _is_numeric(text: str) -> bool:
    return text.startswith("tensor(") and text != f"tensor({STRING})"
