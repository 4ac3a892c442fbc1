"""Parts that ONNX Runtime runs: an ONNX model in the bundle, and a session over it.

Tensors of numbers go in and out without a copy where both sides allow it. Strings, sequences and
maps are passed on as the Python values that ONNX Runtime takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridc.bundle.manifest import PartSpec
from hybridc.errors import BundleError
from hybridc.runtime.library import keep_loaded, memory_file
from hybridc.runtime.tensors import HOST, Place, to_array, to_tensor


@dataclass(frozen=True)
class SessionPart:
    """A part that ONNX Runtime runs.

    Attributes:
        spec: Its description.
        session: The ``onnxruntime.InferenceSession``; it serves several threads.
        place: In host memory.
    """

    spec: PartSpec
    session: Any
    place: Place = HOST

    def start(self) -> tuple[Callable[..., Sequence[Any]], tuple[Any, ...]]:
        """The session itself."""
        return self._run, ()

    def _run(self, *values: Any) -> list[Any]:
        feeds = dict(zip(self.spec.inputs, map(to_array, values), strict=True))
        return [_from_session(value) for value in self.session.run(list(self.spec.outputs), feeds)]


def session_options(libraries: Iterable[str] = ()) -> Any:
    """Options of a quiet session that knows the custom operators of some libraries.

    Args:
        libraries: Their paths, which need be valid only during this call.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for path in libraries:
        keep_loaded(path)
        options.register_custom_ops_library(path)
    return options


def load_session(spec: PartSpec, read: Callable[[str], bytes], threads: int) -> SessionPart:
    """A session over the model of a part, with the custom operators that it brings.

    Raises:
        BundleError: ONNX Runtime cannot load the model.
    """
    import onnxruntime

    model = read(spec.library)
    try:
        with ExitStack() as stack:
            files = (memory_file(name, read(name)) for name in spec.companions)
            options = session_options(map(stack.enter_context, files))
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no base but Exception
        raise BundleError(f"ONNX Runtime cannot load {spec.name}: {error}") from error
    return SessionPart(spec, session)


def _from_session(value: Any) -> Any:
    numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return to_tensor(value) if numeric else value
