"""Names that are no text.

Protobuf lets a file hold any bytes where the schema says string, and its Python interface hands out
``bytes`` for those that are not UTF-8. Names like that are refused before anything compares them
with strings; remarks like that are dropped, since nothing reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto

from hybridc.errors import ModelError

_REMARKS = frozenset(("doc_string", "producer_name", "producer_version", "metadata_props"))


def check_text(model: ModelProto, place: Path) -> None:
    """Drop remarks that are no text from a model that has only been parsed, in place.

    Raises:
        ModelError: A name is no text; says which.
    """
    for message in list(_messages(model)):
        for field, value in message.ListFields():
            wrong = next((text for text in _texts(field, value) if isinstance(text, bytes)), None)
            if wrong is None:
                continue
            if field.name not in _REMARKS:
                kind = message.DESCRIPTOR.name.removesuffix("Proto")
                raise ModelError(
                    f"{place} is not a valid ONNX model: the {field.name} of a {kind} is not "
                    f"UTF-8: {wrong[:80]!r}"
                )
            message.ClearField(field.name)


def _messages(message: Message) -> Iterator[Message]:
    """A message and all inside of it but remarks."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.name not in _REMARKS:
            for inner in (value,) if isinstance(value, Message) else value:
                yield from _messages(inner)


def _texts(field: FieldDescriptor, value: Any) -> Iterator[str | bytes]:
    """The strings in a field that was set."""
    if field.type == FieldDescriptor.TYPE_STRING:
        yield from (value,) if isinstance(value, str | bytes) else value
    elif field.name == "metadata_props":
        for entry in value:
            yield from (entry.key, entry.value)
