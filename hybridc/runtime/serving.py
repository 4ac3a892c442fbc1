"""The server's side: requests for one part, on Triton's Python back end.

``model.py`` in a model repository imports :class:`TritonPythonModel`, which Triton drives. Requests
that it brings together run at once, one behind the other along the first axis.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridc.bundle.dtypes import Array
from hybridc.bundle.read import Bundle, open_bundle
from hybridc.errors import BundleError, HybridcError
from hybridc.runtime.loader import Model, load_bundle
from hybridc.runtime.remote_encoding import decode, encode, wire_specs
from hybridc.runtime.remote_tensors import BUILD, trace_of

BUNDLE = "bundle.hyb"
"""Name of the bundle in the folder of a version."""


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        arrays: Inputs by name.
        build: The build that it is for; empty if it does not say.
        trace: The trace context that it came with, see :data:`TRACE`.
    """

    arrays: Mapping[str, Array]
    build: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)


def open_served(folder: Path) -> Bundle:
    """The bundle in the folder of a version."""
    return open_bundle(folder / BUNDLE)


def newest_version(folder: Path) -> str:
    """The version of a model that a request means that names none."""
    return str(max(int(child.name) for child in folder.iterdir() if child.name.isdigit()))


def build_of(bundle: Bundle) -> str:
    """What requests for a bundle have to name, as hexadecimal digits of 32 bytes."""
    return bundle.manifest.interface or bundle.digest


class Served:
    """A server's bundle.

    Args:
        bundle: The bundle.
        batches: Whether requests may be brought together along the first axis.

    Attributes:
        build: See :func:`build_of`.
        inputs: The tensors of a request.
        outputs: The tensors of a reply, but for ``hybridc_build``.
    """

    def __init__(self, bundle: Bundle, batches: bool) -> None:
        self.build = build_of(bundle)
        self._batches = batches
        self._model: Model = load_bundle(bundle)
        self._encodings = bundle.manifest.encodings
        self.inputs = wire_specs(self._model.inputs, self._encodings)
        self.outputs = wire_specs(self._model.outputs, self._encodings)

    def run(self, requests: Sequence[Asked]) -> list[dict[str, Array] | str]:
        """Outputs by name for each request, or a sentence that says why there are none.

        The output ``hybridc_build`` names this build and holds the seconds that were taken.
        """
        started = time.time_ns()
        wrong = {i for i, asked in enumerate(requests) if asked.build not in ("", self.build)}
        right = [asked.arrays for i, asked in enumerate(requests) if i not in wrong]
        batches = [right] if self._batches and right else [[arrays] for arrays in right]
        results = iter([result for batch in batches for result in self._run(batch)])
        text = f"this server runs another build: {self.build[:8]}..."
        answers = [text if i in wrong else next(results) for i in range(len(requests))]
        if any(asked.trace for asked in requests):
            _make_spans(requests, answers, started)
        return answers

    def _run(self, batch: Sequence[Mapping[str, Array]]) -> list[dict[str, Array] | str]:
        """Results of requests that run at once."""
        start = time.perf_counter()
        try:
            arrays = decode(self._model.inputs, self._encodings, _joined(batch))
            outputs = encode(self._model.outputs, self._encodings, self._model.run(arrays))
        except (HybridcError, ValueError) as error:
            return [str(error)] * len(batch)
        mark = np.frombuffer(
            bytes.fromhex(self.build) + struct.pack("<d", time.perf_counter() - start), np.uint8
        )
        if not self._batches:
            return [{**outputs, BUILD: mark}]
        counts = [len(next(iter(asked.values()))) for asked in batch]
        ends = np.cumsum(counts)[:-1]
        split = {name: np.split(array, ends) for name, array in outputs.items()}
        return [
            {**{name: rows[i] for name, rows in split.items()}, BUILD: np.tile(mark, (count, 1))}
            for i, count in enumerate(counts)
        ]

    def close(self) -> None:
        """Release the model."""
        self._model.close()


def _joined(batch: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    if len(batch) == 1:
        return batch[0]
    return {name: np.concatenate([arrays[name] for arrays in batch]) for name in batch[0]}


def _make_spans(
    requests: Sequence[Asked], answers: Sequence[dict[str, Array] | str], started: int
) -> None:
    """A span for each request with a trace context, where OpenTelemetry's API is installed.

    It is a child of the span that made the request, and spans of requests that ran together have
    the same times. The provider is the process's; without one, nothing is recorded.
    """
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return
    tracer, ended = trace.get_tracer("hybridc"), time.time_ns()
    for asked, answer in zip(requests, answers, strict=True):
        if not asked.trace:
            continue
        span = tracer.start_span(
            "hybridc.serve",
            propagate.extract(asked.trace),
            kind=trace.SpanKind.SERVER,
            attributes={"hybridc.requests": len(requests)},
            start_time=started,
        )
        if isinstance(answer, str):
            span.set_status(trace.StatusCode.ERROR, answer)
        span.end(end_time=ended)


class TritonPythonModel:
    """What Triton's Python back end drives; its methods and their arguments are Triton's."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the bundle of this version.

        Raises:
            BundleError: It is not the one that the configuration names.
        """
        import triton_python_backend_utils

        self._utils: Any = triton_python_backend_utils
        config, version = json.loads(args["model_config"]), args["model_version"]
        bundle = open_served(Path(args["model_repository"]) / version)
        named = config["parameters"].get(f"{BUILD}_{version}", {}).get("string_value")
        build = build_of(bundle)
        if named != build:
            raise BundleError(f"config.pbtxt names build {named} and the bundle is {build}")
        self._served = Served(bundle, batches=int(config["max_batch_size"]) > 0)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request."""
        return [
            self._response(result) for result in self._served.run(list(map(self._asked, requests)))
        ]

    def _asked(self, request: Any) -> Asked:
        find = self._utils.get_input_tensor_by_name
        names = [spec.name for spec in self._served.inputs]
        arrays = {name: find(request, name).as_numpy() for name in names}
        parameters = json.loads(request.parameters() or "{}")
        return Asked(arrays, str(parameters.get(BUILD, "")), trace_of(parameters))

    def _response(self, result: dict[str, Array] | str) -> Any:
        utils = self._utils
        if isinstance(result, str):
            return utils.InferenceResponse(output_tensors=[], error=utils.TritonError(result))
        tensors = [utils.Tensor(n, np.ascontiguousarray(array)) for n, array in result.items()]
        return utils.InferenceResponse(output_tensors=tensors)

    def finalize(self) -> None:
        """Release the model."""
        self._served.close()
