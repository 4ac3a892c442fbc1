"""The other end of a hybrid bundle in this process: what a compile checks its plans with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hybridc.bundle.dtypes import Array
from hybridc.bundle.manifest import RemoteSpec
from hybridc.errors import RemoteMissing
from hybridc.runtime.loader import Model, load_bundle
from hybridc.runtime.remote_client import Reply
from hybridc.runtime.remote_encoding import decode, encode
from hybridc.runtime.remote_tensors import from_bytes, to_bytes
from hybridc.runtime.serving import build_of, newest_version, open_served


@dataclass
class Loopback:
    """Runs the server's bundles out of a model repository.

    Attributes:
        repository: The repository.
        models: What was loaded, by part.
    """

    repository: Path
    models: dict[RemoteSpec, Model] = field(default_factory=dict)

    def infer(
        self, spec: RemoteSpec, arrays: Sequence[Array], until: float, headers: Mapping[str, str]
    ) -> Reply:
        """Run a part, with its tensors brought to bytes and back as over the network."""
        model = self._model(spec)
        named = dict(zip((tensor.name for tensor in spec.inputs), arrays, strict=True))
        sent = _carried(encode(spec.inputs, spec.encodings, named))
        feeds = decode(spec.inputs, spec.encodings, sent)
        start = time.perf_counter()
        results = model.run(feeds)
        seconds = time.perf_counter() - start
        received = _carried(encode(spec.outputs, spec.encodings, results))
        outputs = decode(spec.outputs, spec.encodings, received)
        count = sum(array.nbytes for array in (*sent.values(), *received.values()))
        return Reply([outputs[tensor.name] for tensor in spec.outputs], count, 0.0, seconds)

    def measure(self, spec: RemoteSpec, count: int, until: float) -> tuple[float, float]:
        """Nothing is in between."""
        self._model(spec)
        return 0.0, 0.0

    def check_again(self, spec: RemoteSpec) -> None:
        """It cannot have changed."""

    def close(self) -> None:
        """Release the models."""
        for model in self.models.values():
            model.close()

    def _model(self, spec: RemoteSpec) -> Model:
        if spec not in self.models:
            folder = self.repository / spec.model
            bundle = open_served(folder / (spec.version or newest_version(folder)))
            if build_of(bundle) != spec.build:
                raise RemoteMissing(f"{spec.model}, version {spec.version}, is of another build")
            self.models[spec] = load_bundle(bundle)
        return self.models[spec]


def _carried(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {n: from_bytes(to_bytes(a), a.dtype.name, a.shape) for n, a in arrays.items()}
