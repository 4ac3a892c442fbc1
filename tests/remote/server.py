"""A server of the Open Inference Protocol v2 in this process, with faults to order.

It serves a model repository as Triton does, through the same class that Triton's Python back end
drives. ``fault`` makes it misbehave.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from hybridc.runtime.remote_messages import METHODS, SERVICE, message_types
from hybridc.runtime.remote_tensors import BUILD, DATATYPES, from_bytes, to_bytes
from hybridc.runtime.serving import Asked, Served, open_served

DTYPES = {name: dtype for dtype, name in DATATYPES.items()}

HANG, GARBAGE, CRASH, ABORT = "hang", "garbage", "crash", "abort"
OTHER_BUILD, NO_MODEL, SHORT = "other build", "no model", "short"
"""What may go wrong: no answer, bytes that make no sense, an error, a lost call, a reply of another
build, no such model, a reply with too few bytes."""


def serve(repository: Path) -> dict[tuple[str, str], Served]:
    """Every version of every model in a repository."""
    return {
        (model.name, version.name): Served(open_served(version), batches=False)
        for model in repository.iterdir()
        if model.is_dir()
        for version in model.iterdir()
        if version.is_dir()
    }


class Server:
    """Serves a repository on a port of its own until it is stopped.

    Attributes:
        address: What a client is told.
        place: ``host:port``.
        fault: What goes wrong in calls to run a model; nothing if it is ``None``.
        calls: Names of the methods that were called.
        received: All bytes that came in with requests to run a model.
    """

    def __init__(
        self,
        repository: Path,
        port: int = 0,
        token: tuple[str, str] | None = None,
        credentials: grpc.ServerCredentials | None = None,
        tells_config: bool = True,
    ) -> None:
        self.fault: str | None = None
        self.calls: list[str] = []
        self.received: list[bytes] = []
        self._token, self._tells_config = token, tells_config
        self._served = serve(repository)
        self._released = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._handler(name), message_types()[asked].FromString
            )
            for name, (asked, _) in METHODS.items()
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        place = f"127.0.0.1:{port}"
        if credentials is None:
            self.port = self._server.add_insecure_port(place)
        else:
            self.port = self._server.add_secure_port(place, credentials)
        self.address = self.place = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self) -> None:
        """Drop all connections, calls under way included."""
        self._released.set()
        self._server.stop(0).wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _handler(self, name: str) -> Callable[[Any, grpc.ServicerContext], bytes]:
        def handle(request: Any, context: grpc.ServicerContext) -> bytes:
            self.calls.append(name)
            if self._token and self._token not in [tuple(pair) for pair in self.metadata(context)]:
                context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted")
            return getattr(self, f"_{name}")(request, context)

        return handle

    def metadata(self, context: grpc.ServicerContext) -> Any:
        return context.invocation_metadata()

    def _ServerLive(self, _request: Any, _context: Any) -> bytes:
        return message_types()["ServerLiveResponse"](live=True).SerializeToString()

    def _find(self, name: str, version: str, context: grpc.ServicerContext) -> Served:
        if (name, version) not in self._served or self.fault == NO_MODEL:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {name!r}, version {version}")
        return self._served[name, version]

    def _ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> bytes:
        served = self._find(request.name, request.version, context)
        reply = message_types()["ModelMetadataResponse"](name=request.name, platform="python")
        for kind, specs in ((reply.inputs, served.inputs), (reply.outputs, served.outputs)):
            for spec in specs:
                kind.add(name=spec.name, datatype=DATATYPES[spec.dtype])
        reply.outputs.add(name=BUILD, datatype="UINT8", shape=[40])
        return reply.SerializeToString()

    def _ModelConfig(self, request: Any, context: grpc.ServicerContext) -> bytes:
        if not self._tells_config:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        reply = message_types()["ModelConfigResponse"]()
        served = self._find(request.name, request.version, context)
        entry = reply.config.parameters.add(key=f"{BUILD}_{request.version}")
        entry.value.string_value = served.build
        return reply.SerializeToString()

    def _ModelInfer(self, request: Any, context: grpc.ServicerContext) -> bytes:
        self.received += request.raw_input_contents
        if self.fault == HANG:
            self._released.wait()
        if self.fault == GARBAGE:
            return b"\xff\x07\xff" * 9
        if self.fault == CRASH:
            context.abort(grpc.StatusCode.INTERNAL, "the model broke")
        if self.fault == ABORT:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        served = self._find(request.model_name, request.model_version, context)
        pairs = zip(request.inputs, request.raw_input_contents, strict=True)
        arrays = {t.name: from_bytes(raw, DTYPES[t.datatype], tuple(t.shape)) for t, raw in pairs}
        builds = [p.value.string_param for p in request.parameters if p.key == BUILD]
        (result,) = served.run([Asked(arrays, builds[0])])
        if isinstance(result, str):
            context.abort(grpc.StatusCode.INTERNAL, result)
        return self._reply(result).SerializeToString()

    def _reply(self, result: dict[str, Any]) -> Any:
        if self.fault == OTHER_BUILD:
            result = {**result, BUILD: result[BUILD][::-1]}
        reply = message_types()["ModelInferResponse"]()
        for name, array in result.items():
            reply.outputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
            reply.raw_output_contents.append(to_bytes(array))
        if self.fault == SHORT:
            reply.raw_output_contents[0] = reply.raw_output_contents[0][:-1]
        return reply
