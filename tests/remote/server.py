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
from hybridc.runtime.remote_tensors import BUILD, DATATYPES, from_bytes, to_bytes, trace_of
from hybridc.runtime.serving import Asked, Served, open_served

DTYPES = {name: dtype for dtype, name in DATATYPES.items()}

HANG, GARBAGE, CRASH, ABORT = "hang", "garbage", "crash", "abort"
OTHER_BUILD, NO_MODEL, SHORT = "other build", "no model", "short"
"""What may go wrong: no answer, bytes that make no sense, an error, a lost call, a reply of another
build, no such model, a reply with too few bytes."""


class Models:
    """Every version of every model in a repository, run by one thread as Triton's instances are.

    A thread for each request would have a pool of TVM's workers each.
    """

    def __init__(self, repository: Path) -> None:
        self._served = {
            (model.name, version.name): Served(open_served(version), batches=False)
            for model in repository.iterdir()
            if model.is_dir()
            for version in model.iterdir()
            if version.is_dir()
        }
        self._instance = ThreadPoolExecutor(1)

    def find(self, name: str, version: str) -> Served | None:
        """A version of a model; the newest if none is named."""
        newest = max((own[1] for own in self._served if own[0] == name), key=int, default="")
        return self._served.get((name, version or newest))

    def run(self, served: Served, asked: Asked) -> dict[str, Any] | str:
        (result,) = self._instance.submit(served.run, [asked]).result()
        return result

    def close(self) -> None:
        """Drop what waits, end the thread and release the models."""
        self._instance.shutdown(cancel_futures=True)
        for served in self._served.values():
            served.close()


class Faulty:
    """Something that misbehaves to order.

    Attributes:
        fault: What goes wrong; nothing if it is ``None``. Calls that hang end when it changes.
    """

    def __init__(self) -> None:
        self._fault: str | None = None
        self._stopped = False
        self._changed = threading.Condition()

    @property
    def fault(self) -> str | None:
        return self._fault

    @fault.setter
    def fault(self, fault: str | None) -> None:
        with self._changed:
            self._fault = fault
            self._changed.notify_all()

    def hang(self) -> None:
        """Wait until something else goes wrong, or nothing, or all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._fault != HANG or self._stopped)

    def let_go(self) -> None:
        """End the calls that hang, for good."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Server(Faulty):
    """Serves a repository on a port of its own until it is stopped.

    Attributes:
        address: What a client is told.
        place: ``host:port``.
        calls: Names of the methods that were called.
        received: All bytes that came in with requests to run a model.
        traceparents: The header of each of them that says which trace it is part of.
    """

    def __init__(
        self,
        repository: Path,
        port: int = 0,
        token: tuple[str, str] | None = None,
        credentials: grpc.ServerCredentials | None = None,
        tells_config: bool = True,
    ) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.received: list[bytes] = []
        self.traceparents: list[str | None] = []
        self._token, self._tells_config = token, tells_config
        self._models = Models(repository)
        self._threads = ThreadPoolExecutor(16)
        self._server = grpc.server(self._threads, options=(("grpc.so_reuseport", 0),))
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
        stopped = self._server.stop(0)
        self.let_go()
        stopped.wait()
        self._threads.shutdown()
        self._models.close()

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
        served = self._models.find(name, version)
        if served is None or self.fault == NO_MODEL:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown model {name!r}, version {version}")
        return served

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
        fault = self.fault
        if fault == HANG:
            self.hang()
        if fault == GARBAGE:
            return b"\xff\x07\xff" * 9
        if fault == CRASH:
            context.abort(grpc.StatusCode.INTERNAL, "the model broke")
        if fault in (ABORT, HANG):
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        served = self._find(request.model_name, request.model_version, context)
        pairs = zip(request.inputs, request.raw_input_contents, strict=True)
        arrays = {t.name: from_bytes(raw, DTYPES[t.datatype], tuple(t.shape)) for t, raw in pairs}
        self.traceparents.append(dict(self.metadata(context)).get("traceparent"))
        given = {p.key: p.value.string_param for p in request.parameters}
        result = self._models.run(served, Asked(arrays, given[BUILD], trace_of(given)))
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
