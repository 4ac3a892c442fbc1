"""Read an ONNX file: parse, find its external data, check it, and take note of what it is.

Tensors in external files stay there and are mapped when they are needed, so a model may be larger
than the 2 GB that one protobuf message can hold.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir

from hybridc.errors import ModelError, UsageError
from hybridc.frontend.border import border_types, forget_maps
from hybridc.frontend.limits import check_limits
from hybridc.frontend.repair import repair, shape_outputs
from hybridc.frontend.text import check_text
from hybridc.frontend.upgrade import upgrade

OLDEST_OPSET = 1
NEWEST_OPSET = 28
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """A model as it was read.

    Attributes:
        path: The file.
        model: Its contents; tensors in external files are mapped, not loaded.
        sha256: Checksum over the file and its external data.
        types: ONNX's text of the type of each input and output that is no tensor of numbers.
    """

    path: Path
    model: ir.Model
    sha256: str
    types: Mapping[str, str] = field(default_factory=dict)


def read_model(path: str | os.PathLike[str]) -> Source:
    """Read and check an ONNX file.

    Raises:
        UsageError: There is no such file.
        ModelError: It is not ONNX, cut off, incomplete, not valid, or of an opset out of range.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"there is no file {file}")
    proto = _parse(file)
    check_text(proto, file)
    external = list(_external_files(proto, file))
    check_limits(proto, file)
    _check_opset(proto, file)
    repairs = repair(proto)
    _check_valid(proto if repairs.changed else str(file), file)
    if upgrade(proto, file):
        _check_valid(proto, file)
    shapeless = shape_outputs(proto, repairs)
    types = border_types(proto)
    model = _deserialize(proto, shapeless, file)
    ir.external_data.set_base_dir(model.graph, file.parent)
    return Source(file, model, _checksum([file, *external]), types)


def source_of(proto: onnx.ModelProto) -> Source:
    """A model that is in memory already, checked like one from a file.

    Raises:
        ModelError: It is not valid or of an opset out of range.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    check_text(copy, Path("model"))
    place = Path(copy.graph.name or "model")
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
    check_limits(copy, place)
    _check_opset(copy, place)
    repairs = repair(copy)
    _check_valid(copy, place)
    if upgrade(copy, place):
        _check_valid(copy, place)
    shapeless = shape_outputs(copy, repairs)
    types = border_types(copy)
    return Source(place, _deserialize(copy, shapeless, place), digest, types)


def _deserialize(proto: onnx.ModelProto, shapeless: frozenset[str], place: Path) -> ir.Model:
    forget_maps(proto)
    try:
        model: ir.Model = ir.from_proto(proto)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{place} cannot be read: {error}") from error
    for value in model.graph.outputs:
        if value.name in shapeless:
            value.shape = None
    return model


def _parse(file: Path) -> onnx.ModelProto:
    try:
        proto = onnx.load(file, format="protobuf", load_external_data=False)
    except google.protobuf.message.DecodeError as error:
        raise ModelError(
            f"{file} is not an ONNX model, or it is cut off: its contents cannot be parsed"
        ) from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    if proto.HasField("graph") and 0 < proto.ir_version < 3 and not proto.opset_import:
        proto.ir_version = 3  # from here on opsets are stated; there was only one before
        proto.opset_import.add(version=1)
    if not proto.HasField("graph") or not proto.opset_import:
        raise ModelError(f"{file} is not an ONNX model, or it is cut off: it holds no graph")
    return proto


def _external_files(proto: onnx.ModelProto, file: Path) -> Iterator[Path]:
    """External data files in use, each once; refuses what is missing, short, or elsewhere."""
    seen: set[Path] = set()
    for tensor in _tensors(proto.graph):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        data = _external_path(file, entries.get("location", ""), tensor.name)
        if data.stat().st_size < _external_end(file, entries, tensor):
            raise ModelError(f"{file}: its external data file {data} is too short; fetch it anew")
        if data not in seen:
            seen.add(data)
            yield data


def _external_end(file: Path, entries: Mapping[str, str], tensor: onnx.TensorProto) -> int:
    """Where a tensor's bytes end in its external file; without a length, its shape gives it."""
    try:
        size: int = math.ceil(ir.DataType(tensor.data_type).itemsize * math.prod(tensor.dims))
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", 0))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{file}: the external data of {tensor.name!r}: {error}") from error
    if offset < 0 or length not in (0, size):
        raise ModelError(
            f"{file}: tensor {tensor.name!r} has {size} bytes and its external data is given as "
            f"{length} bytes at {offset}"
        )
    return offset + size


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """All tensors of a graph, those in attributes and subgraphs included."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _tensors(subgraph)


def _external_path(file: Path, location: str, tensor: str) -> Path:
    folder = file.resolve().parent
    data = (folder / location).resolve()
    if not location or not data.is_relative_to(folder):
        raise ModelError(f"{file}: tensor {tensor!r} names data outside the model's folder")
    if not data.is_file():
        raise ModelError(
            f"{file}: its external data file {location} is missing; put it beside the model"
        )
    return data


def _check_opset(proto: onnx.ModelProto, file: Path) -> None:
    versions = {entry.domain: int(entry.version) for entry in proto.opset_import}
    version = versions.get("", versions.get("ai.onnx"))
    if version is not None and not OLDEST_OPSET <= version <= NEWEST_OPSET:
        raise ModelError(
            f"{file} uses opset {version} and hybridc reads {OLDEST_OPSET} to {NEWEST_OPSET}; "
            "convert it with onnx.version_converter"
        )


def _check_valid(model: onnx.ModelProto | str, file: Path) -> None:
    try:
        onnx.checker.check_model(model if isinstance(model, str) else _without_external(model))
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0] if lines else type(error).__name__
        raise ModelError(f"{file} is not a valid ONNX model: {reason}") from error


def _without_external(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model itself, or a copy without external data: the checker would look for it in the
    working folder, and :func:`_external_files` has looked where it is.
    """
    external = onnx.TensorProto.EXTERNAL
    if all(tensor.data_location != external for tensor in _tensors(model.graph)):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in _tensors(copy.graph):
        if tensor.data_location == external:
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.dims[:] = [0]
    return copy


def _checksum(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
