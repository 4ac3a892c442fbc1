"""The manifest: what a bundle holds, as dataclasses and as JSON.

The JSON text ends with a digest of itself, so that any changed byte is noticed; every other file
of the bundle is listed with its own SHA-256.

Schema versions are ``major.minor``. A reader takes every minor of its major and ignores fields
that it does not know; a change that an old reader would misread raises the major.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridc.errors import BundleError

SCHEMA = (2, 0)
MANIFEST = "manifest.json"

STRING = "string"
"""Element type of a tensor of strings."""

UNKNOWN_RANK = "..."
"""The only dimension of an output whose rank only running will tell."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type and shape of a tensor that crosses a border.

    Attributes:
        name: ONNX name.
        dtype: numpy's name of the element type; ``string``; or for what is no tensor, ONNX's text
            of the type, such as ``seq(tensor(float))``.
        shape: Dimensions; a string names a dynamic dimension, and ``...`` alone is any shape.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, and not a sequence, a map or an optional."""
        return "(" not in self.dtype

    @property
    def is_numeric(self) -> bool:
        """Whether it is a tensor of numbers."""
        return self.is_tensor and self.dtype != STRING


@dataclass(frozen=True)
class DeviceSpec:
    """A device of the plan and what it needs of the machine that loads the bundle.

    Attributes:
        name: Name in the plan, such as ``llvm:0``.
        kind: Kind of target that built for it.
        built_for: The processor or architecture it was built for.
        architecture: ``x86_64`` or ``aarch64``: whose runtime library runs it; empty if any.
        cpu_flags: Flags that /proc/cpuinfo must list.
        memory_bytes: Planned peak of intermediate tensors of its parts.
        packages: Python packages that must be installed, as in ``onnxruntime>=1.32``.
        device_code: What an accelerator's code was made for: ``sm_90``, or ``compute_90`` for PTX.
        libraries: Shared libraries that must be installed beside the driver.
    """

    name: str
    kind: str
    built_for: str
    architecture: str
    cpu_flags: tuple[str, ...] = ()
    memory_bytes: int = 0
    packages: tuple[str, ...] = ()
    device_code: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True)
class FallbackSpec:
    """A node that ONNX Runtime runs since no target compiles it.

    Attributes:
        node: ONNX name.
        operator: Its operator.
        reason: Why it was not compiled.
    """

    node: str
    operator: str
    reason: str


@dataclass(frozen=True)
class EncodingSpec:
    """A tensor that is sent in fewer bytes than it is computed in.

    Attributes:
        tensor: ONNX name.
        dtype: Element type that it is sent as, ``float16`` or ``uint8``.
    """

    tensor: str
    dtype: str


@dataclass(frozen=True)
class RemoteSpec:
    """The other end of a part that a server runs: a model of the Open Inference Protocol.

    Attributes:
        model: Name of the model on the server.
        version: Its version there; empty for the newest.
        build: Digest of the server's bundle, or its ``interface`` if it has one.
        inputs: The tensors that are sent, in order.
        outputs: The tensors that come back, in order.
        encodings: Those of them that are sent in fewer bytes.
    """

    model: str
    version: str
    build: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    encodings: tuple[EncodingSpec, ...] = ()


@dataclass(frozen=True)
class PartSpec:
    """One part: a piece of the model compiled to one library for one device.

    Attributes:
        name: Name of the part.
        device: Name of its device.
        library: Path of its library inside the bundle, or of its model for ONNX Runtime.
        inputs: Names of the tensors it reads, in the order of its arguments.
        outputs: Names of the tensors it computes, in order.
        weights: Names of its weights in the weights file, in order.
        nodes: ONNX names of the nodes it runs.
        memory_bytes: Planned peak of its intermediate tensors.
        companions: Paths of other libraries that its library needs.
        thread_bytes: What each thread takes besides, to work in.
        remote: Who runs it instead, if a server does; then it has no library.
    """

    name: str
    device: str
    library: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    nodes: tuple[str, ...]
    memory_bytes: int = 0
    companions: tuple[str, ...] = ()
    thread_bytes: int = 0
    remote: RemoteSpec | None = None


@dataclass(frozen=True)
class CrossingSpec:
    """A tensor that crosses between this machine and a server, and why it may.

    Attributes:
        tensor: ONNX name.
        source: Device that has it, or ``input``.
        destination: Device that gets it, or ``output``.
        bytes: Its size, at the upper end of what is dynamic.
        share: Its size over that of the private inputs, or of all inputs if none is private.
        reason: Why it may cross.
    """

    tensor: str
    source: str
    destination: str
    bytes: int
    share: float
    reason: str


@dataclass(frozen=True)
class PriceSpec:
    """What a plan was predicted to cost.

    Attributes:
        requests_per_second: Runs per second that count.
        dollars_per_hour: Price of an hour at that rate.
        break_even: Rates at which the plan costs what the one without the server does.
    """

    requests_per_second: float
    dollars_per_hour: float
    break_even: tuple[float, ...] = ()


@dataclass(frozen=True)
class PlanSpec:
    """One way to run the model, partly on a server; the loader chooses among several.

    Attributes:
        name: ``local``, ``remote`` if the server runs all of it, or ``cut1`` and so on.
        parts: Its parts, in an order in which they can run.
        edge_seconds: Predicted time of the parts here.
        server_seconds: Predicted time of the parts on the server.
        round_trips: Calls to the server in one run.
        bytes: What is sent and received in one run.
        crossings: What that is.
        tolerance: Largest error of a sample that counts as right by this plan; ``None`` for that
            of the bundle.
        price: What it costs; where plans have a price, the cheapest is taken and not the fastest.
    """

    name: str
    parts: tuple[PartSpec, ...]
    edge_seconds: float
    server_seconds: float
    round_trips: int
    bytes: int
    crossings: tuple[CrossingSpec, ...] = ()
    tolerance: float | None = None
    price: PriceSpec | None = None


@dataclass(frozen=True)
class LinkSpec:
    """The link to the server that a plan was made for.

    Attributes:
        round_trip_seconds: Time of a call without contents.
        bytes_per_second: Bandwidth.
    """

    round_trip_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class TransferSpec:
    """A tensor that crosses from one device to another.

    Attributes:
        tensor: ONNX name.
        source: Device that computes it, or ``input``.
        destination: Device that reads it.
        bytes: Its size; 0 where a dimension is dynamic.
    """

    tensor: str
    source: str
    destination: str
    bytes: int


@dataclass(frozen=True)
class AlternativeSpec:
    """Another way to run the model, for machines that cannot run the ways before it.

    Attributes:
        devices: Its devices.
        parts: Its parts, in an order in which they can run.
        transfers: Tensors that cross between its devices.
        runtime: Paths of the runtime's libraries that it needs, as in :class:`Manifest`.
        weights: Path of its weights.
        fallbacks: Nodes that it leaves to ONNX Runtime, with reasons.
    """

    devices: tuple[DeviceSpec, ...]
    parts: tuple[PartSpec, ...]
    transfers: tuple[TransferSpec, ...]
    runtime: Mapping[str, tuple[str, ...]]
    weights: str
    fallbacks: tuple[FallbackSpec, ...] = ()


@dataclass(frozen=True)
class SampleSpec:
    """Stored inputs with the outputs that a reference gave for them.

    Attributes:
        inputs: Path of the inputs inside the bundle.
        outputs: Path of the reference outputs.
        reference: What computed them.
    """

    inputs: str
    outputs: str
    reference: str


@dataclass(frozen=True)
class FileSpec:
    """One file of the bundle with its checksum."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a bundle that is not code or tensors.

    Attributes:
        schema: ``major.minor`` of this description.
        hybridc: Version of hybridc that wrote the bundle.
        tvm: Version of the TVM runtime in ``lib/``.
        tvm_ffi: Version of apache-tvm-ffi that the runtime was built against.
        model: File name of the model.
        model_sha256: Checksum of the model and its external data; empty if the server's part may be
            replaced, which changes the model.
        inputs: The model's inputs in order.
        outputs: The model's outputs in order.
        dimensions: Lowest and highest value of each dynamic dimension.
        devices: Devices of the plan.
        parts: Parts in an order in which they can run.
        transfers: Tensors that cross between devices.
        runtime: Paths of the runtime's libraries by architecture, in the order of loading.
        weights: Path of the weights file.
        samples: Stored samples.
        tolerance: Largest error relative to an output's scale at which a sample counts as right.
        steps: Distance between two values of a dynamic dimension, where it is not 1.
        fallbacks: Nodes that are left to ONNX Runtime, with reasons.
        alternatives: Other ways to run the model, in the order in which they are tried.
        plans: Ways to run the model with a server, the best for ``link`` first; ``parts`` are
            those of the plan that needs no server, or else of the first.
        link: The link that was expected; ``None`` without a server.
        encodings: In a server's bundle, the inputs and outputs that are sent in fewer bytes.
        interface: In a server's bundle that may be replaced, what a request names instead of its
            digest: a checksum of the other end's code and weights and of the tensors at the cut.
        files: Every other file of the bundle.
    """

    schema: str
    hybridc: str
    tvm: str
    tvm_ffi: str
    model: str
    model_sha256: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: Mapping[str, tuple[int, int]]
    devices: tuple[DeviceSpec, ...]
    parts: tuple[PartSpec, ...]
    transfers: tuple[TransferSpec, ...]
    runtime: Mapping[str, tuple[str, ...]]
    weights: str
    samples: tuple[SampleSpec, ...] = ()
    tolerance: float = 1e-4
    steps: Mapping[str, int] = field(default_factory=dict)
    fallbacks: tuple[FallbackSpec, ...] = ()
    alternatives: tuple[AlternativeSpec, ...] = ()
    plans: tuple[PlanSpec, ...] = ()
    link: LinkSpec | None = None
    encodings: tuple[EncodingSpec, ...] = ()
    interface: str = ""
    files: tuple[FileSpec, ...] = field(default=())

    def device(self, name: str) -> DeviceSpec:
        """The device of that name."""
        return next(device for device in self.devices if device.name == name)

    def ways(self) -> tuple[Manifest, ...]:
        """The ways to run the model, each as a manifest without alternatives."""
        fields = ("devices", "parts", "transfers", "runtime", "weights", "fallbacks")
        first = dataclasses.replace(self, alternatives=())
        others = ({name: getattr(a, name) for name in fields} for a in self.alternatives)
        return (first, *(dataclasses.replace(first, **other) for other in others))


def to_json(manifest: Manifest) -> bytes:
    """The manifest as text, its own digest last."""
    body = dataclasses.asdict(manifest)
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    return _canonical({**body, "digest": digest})


def from_json(text: bytes, where: str) -> Manifest:
    """Read and check a manifest.

    Raises:
        BundleError: Damaged, not a manifest, or of a newer major schema.
    """
    try:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError("it is not a JSON object")
        _check_schema(body, where)
        digest = body.pop("digest", None)
        if hashlib.sha256(_canonical(body)).hexdigest() != digest:
            raise ValueError("its digest does not fit its contents")
        if _canonical({**body, "digest": digest}) != text:
            raise ValueError("its text was changed")
        return typing.cast(Manifest, build_record(Manifest, body, "manifest"))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BundleError(
            f"{where} is damaged: {error}; compile the model again or fetch the bundle anew"
        ) from error


def _canonical(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode()


def _check_schema(body: Mapping[str, Any], where: str) -> None:
    if "schema" not in body:
        raise ValueError("manifest.schema is missing")
    major, _, minor = str(body["schema"]).partition(".")
    if int(major) != SCHEMA[0] or int(minor) < 0:
        raise BundleError(
            f"{where} has schema {body['schema']}, and this hybridc reads {SCHEMA[0]}.x: "
            "install the hybridc that wrote the bundle or a later one"
        )


def build_record(kind: Any, value: Any, path: str) -> Any:
    """``value`` out of JSON as ``kind``, checked field by field; ``path`` is its name in errors.

    Raises:
        ValueError: Something in it is of the wrong type or missing.
    """
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _build_tuple(arguments, value, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _expect(isinstance(value, dict), path, "an object")
        return {
            key: build_record(arguments[1], item, f"{path}.{key}") for key, item in value.items()
        }
    allowed = arguments if origin in (typing.Union, types.UnionType) else (kind,)
    if isinstance(value, dict) and dataclasses.is_dataclass(allowed[0]):
        return _build_dataclass(allowed[0], value, path)
    if float in allowed and isinstance(value, int):
        value = float(value)
    fits = isinstance(value, tuple(allowed)) and (bool in allowed or not isinstance(value, bool))
    _expect(fits, path, " or ".join(item.__name__ for item in allowed))
    return value


def _build_dataclass(kind: Any, value: Any, path: str) -> Any:
    _expect(isinstance(value, dict), path, "an object")
    hints, needed = _fields_of(kind)
    found = {
        name: build_record(hints[name], item, f"{path}.{name}")
        for name, item in value.items()
        if name in hints
    }
    missing = next((name for name in needed if name not in found), None)
    if missing is not None:
        raise ValueError(f"{path}.{missing} is missing")
    return kind(**found)


@functools.cache
def _fields_of(kind: Any) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Types of a dataclass's fields, and which it needs; finding out takes longer than reading."""
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    blank = dataclasses.MISSING
    needed = [f.name for f in fields if f.default is blank and f.default_factory is blank]
    return {f.name: hints[f.name] for f in fields}, tuple(needed)


def _build_tuple(arguments: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    _expect(isinstance(value, list), path, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(
            build_record(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value)
        )
    _expect(len(value) == len(arguments), path, f"a list of {len(arguments)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(build_record(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(pairs))


def _expect(condition: bool, path: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{path} is not {what}")
