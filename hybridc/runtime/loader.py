"""Load a bundle and call it.

model = hybridc.load("model.hyb")
outputs = model(x=array)               # or model.run({"x": array})
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hybridc.bundle.manifest import Manifest, TensorSpec
from hybridc.bundle.read import Bundle, open_bundle
from hybridc.bundle.tensors import Array
from hybridc.errors import DeviceError, UsageError
from hybridc.runtime.calls import Call
from hybridc.runtime.cuda import load_runtime_library
from hybridc.runtime.executor import Executor, Observer
from hybridc.runtime.gate import CUDA, Gate
from hybridc.runtime.inputs import InputReader
from hybridc.runtime.library import load_runtime
from hybridc.runtime.machine import require
from hybridc.runtime.parts import LoadedPart, load_part
from hybridc.runtime.remote_settings import RemoteSettings, read_settings
from hybridc.runtime.stream import stream
from hybridc.runtime.tensors import to_array, to_tensor
from hybridc.runtime.threads import available_cores, available_threads, use_threads
from hybridc.runtime.workers import Workers, cores_of

if TYPE_CHECKING:
    from hybridc.runtime.remote_client import Client
    from hybridc.runtime.timeline import Timeline

_LOG = logging.getLogger("hybridc.loader")


class Model:
    """A loaded bundle. May be called from several threads at once.

    Attributes:
        manifest: The bundle's description; of one with alternatives, the way that is run.
        missed: Why each way before that one cannot run here.
    """

    missed: tuple[str, ...] = ()

    def __init__(
        self,
        manifest: Manifest,
        parts: Sequence[LoadedPart],
        threads: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.manifest = manifest
        self._observer = observer
        self._threads = threads or available_threads()
        self._compiled = any(manifest.runtime.values())
        self._gate = _gate_of(manifest)
        self._parts: Sequence[LoadedPart] | None = parts
        self._reader = InputReader(manifest, {part.place for part in parts})
        self._types = [(spec.name, spec.dtype) for spec in manifest.outputs]
        first = Executor(manifest, parts, observer)
        self._idle: deque[Executor] = deque([first])
        shares = cores_of(manifest.devices, available_cores()[: self._threads])
        self._workers = Workers(shares, self._threads if self._compiled else 0)
        self._calls = itertools.count()
        self._depth = 1 + len({task.worker for task in first.tasks})
        self._is_shared_out = len(shares) > 1 or first.has_branches

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs' names, element types and shapes, in order."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs' names, element types and shapes, in order."""
        return self.manifest.outputs

    @property
    def plan(self) -> dict[str, tuple[str, ...]]:
        """Names of the ONNX nodes that run on each device."""
        nodes: dict[str, tuple[str, ...]] = {}
        for part in self.manifest.parts:
            nodes[part.device] = nodes.get(part.device, ()) + part.nodes
        return nodes

    def __call__(self, /, **arrays: Any) -> dict[str, Array]:
        """Run the model on arrays given by input name; see :meth:`run`."""
        return self.run(arrays)

    def run(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Run the model.

        Args:
            arrays: For each input a numpy array or a DLPack tensor, of exactly the type and shape
                in :attr:`inputs`. A tensor is in host memory, or on a device of the plan; there it
                is used as it is, and what computes it must have finished. Strings come as an array
                of ``str``, a sequence as a list, a map as a dict, an empty optional as ``None``.

        Returns:
            A numpy array (or list, dict or ``None``) for each output by name. The arrays are the
            caller's to keep.

        Raises:
            UsageError: An input is missing, unknown, or has the wrong type or shape; or the
                model was closed.
        """
        return self._named(self.run_tensors(self._reader.read(arrays)))

    def _named(self, results: Sequence[Any]) -> dict[str, Array]:
        """The outputs as arrays, by name."""
        typed = zip(self._types, results, strict=True)
        return {name: to_array(result, dtype) for (name, dtype), result in typed}

    def run_tensors(self, tensors: list[Any]) -> list[Any]:
        """Run on tvm_ffi tensors in the inputs' order, unchecked; gives tvm_ffi tensors."""
        executor = self._executor()
        with _guard(self._gate, alone=executor.is_new):
            if self._is_shared_out:
                results = self._start(executor, tensors).result()
            else:
                if self._compiled:
                    use_threads(self._threads)
                results = executor.run(tensors)
        self._give_back(executor)  # one that raised is not used again
        return results

    def stream(
        self, inputs: Iterable[Mapping[str, Any]], depth: int | None = None
    ) -> Iterator[dict[str, Array]]:
        """Run the model on many inputs as a pipeline, where each device works on another of them.

        Args:
            inputs: Arrays by input name, as for :meth:`run`. The next is taken when a call ends.
            depth: Most calls under way at a time; one more than there are devices and ways of
                copies if it is not given.

        Yields:
            The outputs for each of the inputs, in their order.

        Raises:
            UsageError, PartError: As :meth:`run`, in the place of the outputs concerned.
        """
        if depth is None:
            depth = self._depth
        if depth < 1:
            raise UsageError(f"depth is {depth} and must be at least 1")
        for results in stream(self._submit, inputs, depth):
            yield self._named(results)

    def observed(self, timeline: Timeline, kernels: bool = True) -> Model:
        """A model over the same code and weights, whose runs are noted in a timeline.

        Args:
            timeline: Where parts, copies and kernels are noted.
            kernels: Whether kernels are noted too, which slows small ones down.

        Raises:
            UsageError: The model was closed, or a server runs parts of it.
        """
        if self._parts is None or self.manifest.plans:
            raise UsageError("a model that was closed, or that a server runs, has no timeline")
        parts = [timeline.watch(part, kernels) for part in self._parts]
        return Model(self.manifest, parts, self._threads, timeline.observe)

    def _submit(self, arrays: Mapping[str, Any]) -> Future[list[Any]]:
        """Begin a call; an executor's first call ends before this returns."""
        tensors = self._reader.read(arrays)
        executor = self._executor()
        guard = _guard(self._gate, alone=executor.is_new)
        guard.__enter__()
        future = self._start(executor, tensors)

        def end(done: Future[list[Any]]) -> None:
            guard.__exit__(None, None, None)
            if done.exception() is None:
                self._give_back(executor)

        future.add_done_callback(end)
        return future

    def _executor(self) -> Executor:
        if self._parts is None:
            raise UsageError("this model was closed; load the bundle again")
        try:
            return self._idle.pop()
        except IndexError:
            return Executor(self.manifest, self._parts, self._observer)

    def _start(self, executor: Executor, tensors: list[Any]) -> Future[list[Any]]:
        """Begin a call on the workers; an executor's first with CUDA runs here, task by task."""
        if self._gate is not None and executor.is_new:
            return finished(lambda: executor.run(tensors))
        return Call(executor, self._workers, tensors, next(self._calls)).start()

    def _give_back(self, executor: Executor) -> None:
        if self._parts is not None:
            self._idle.append(executor)

    def close(self) -> None:
        """Release code and weights. Arrays returned before stay valid."""
        with _guard(self._gate):
            self._parts = None
            self._idle.clear()
            self._workers.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    remote: str | RemoteSettings | None = None,
) -> Model:
    """Load a bundle: a folder or a ``.hyb`` file.

    The checksums of everything that is used are checked first.

    Args:
        path: The bundle.
        threads: Threads for the kernels of one call, the caller's included; as many as the
            process may use cores if it is not given.
        remote: Where the server of a hybrid bundle is: ``host:port``, several with commas between,
            or all settings. Without it the environment says, see
            :mod:`hybridc.runtime.remote_settings`; if that does not, everything runs here.

    Raises:
        UsageError: There is nothing at ``path``, or ``threads`` is not positive.
        RemoteMissing: The bundle cannot run without its server, which does not answer.
        BundleError: The bundle is damaged or of a newer schema.
        DeviceError: This machine lacks something that the bundle needs; the message says what.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads} and must be at least 1")
    bundle = open_bundle(path)
    if remote is not None and not bundle.manifest.plans:
        raise UsageError(f"{path} has no plan with a server; compile it with --remote")
    return load_bundle(bundle, threads, read_settings(remote))


def load_bundle(
    bundle: Bundle,
    threads: int | None = None,
    remote: RemoteSettings | None = None,
    client: Client | None = None,
) -> Model:
    """Load an opened bundle; see :func:`load`. A ``client`` takes the place of connections."""
    missed = []
    for way in bundle.manifest.ways():
        try:
            prepare(way)
        except DeviceError as error:
            missed.append(str(error))
            continue
        for reason in missed:
            _LOG.warning("%s; %s runs instead", reason, names_of(way))
        model = _load_way(bundle, way, threads, remote, client)
        model.missed = tuple(missed)
        return model
    raise DeviceError("; and ".join(missed))


def names_of(manifest: Manifest) -> str:
    """The devices that a way to run the model uses, in words."""
    return " and ".join(device.name for device in manifest.devices)


def prepare(manifest: Manifest) -> None:
    """Make a machine ready for a way to run a model.

    Raises:
        DeviceError: It lacks something; the message says what.
    """
    for device in manifest.devices:
        require(device)
    for device in manifest.devices:
        for library in device.libraries:
            load_runtime_library(library)


def load_way(bundle: Bundle, manifest: Manifest) -> Model:
    """Load one way to run a bundle's model, out of those that its manifest lists.

    Raises:
        DeviceError: This machine lacks something that it needs.
    """
    prepare(manifest)
    return _load_way(bundle, manifest, None, None, None)


def _load_way(
    bundle: Bundle,
    manifest: Manifest,
    threads: int | None,
    remote: RemoteSettings | None,
    client: Client | None,
) -> Model:
    for libraries in manifest.runtime.values():
        load_runtime(manifest, bundle.read_code, libraries)
    arrays = bundle.tensors(manifest.weights)
    weights = {name: to_tensor(array) for name, array in arrays.items()}
    count = threads or available_threads()
    with _guard(_gate_of(manifest)):
        read = bundle.read_code
        if manifest.plans:
            from hybridc.runtime.remote import load_hybrid

            load_one = functools.partial(
                load_part, manifest, read=read, weights=weights, threads=count
            )
            return load_hybrid(manifest, load_one, count, remote, client)
        parts = [load_part(manifest, spec, read, weights, count) for spec in manifest.parts]
    return Model(manifest, parts, count)


def _gate_of(manifest: Manifest) -> Gate | None:
    return CUDA if any(device.kind == "cuda" for device in manifest.devices) else None


def _guard(gate: Gate | None, *, alone: bool = False) -> AbstractContextManager[None]:
    if gate is None:
        return nullcontext()
    return gate.alone() if alone else gate.together()


def finished(call: Callable[[], list[Any]]) -> Future[list[Any]]:
    """A call made here and now, as one that has ended."""
    future: Future[list[Any]] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future
