"""What two ends have to agree on, so that the server's part can be replaced alone.

A part on the server fits an edge bundle if it takes what the edge's parts give. That is more than
the names and shapes of the tensors at the cut: a head that was trained again fits, but the head to
another stem does not, and its results would be wrong without any error. So the checksum covers all
code and weights that run at the edge by the plan, and nothing of the server's part but its tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator

from hybridc.bundle.manifest import Manifest
from hybridc.packaging import BuiltPart


def interface_of(own: Iterable[BuiltPart], manifest: Manifest) -> str:
    """The checksum of an interface, in hexadecimal digits of 32 bytes.

    Args:
        own: The parts at the edge, in their order.
        manifest: The server's bundle: its inputs, outputs, encodings and dimensions count.
    """
    cut = {
        "inputs": [dataclasses.asdict(spec) for spec in manifest.inputs],
        "outputs": [dataclasses.asdict(spec) for spec in manifest.outputs],
        "encodings": [dataclasses.asdict(spec) for spec in manifest.encodings],
        "dimensions": {name: list(ends) for name, ends in sorted(manifest.dimensions.items())},
    }
    whole = hashlib.sha256(json.dumps(cut, sort_keys=True).encode())
    for item in own:
        for piece in _pieces(item):
            whole.update(hashlib.sha256(piece).digest())  # each of one length, so none runs over
    return whole.hexdigest()


def _pieces(item: BuiltPart) -> Iterator[bytes | memoryview]:
    """All that a part runs, and what its tensors are called."""
    names = [
        [str(value.name) for value in values] for values in (item.part.inputs, item.part.outputs)
    ]
    yield json.dumps(names).encode()
    yield item.artifact.library
    for name, library in item.artifact.companions.items():
        yield name.encode()
        yield library
    for name, array in item.artifact.weights.items():
        yield json.dumps([name, array.dtype.name, array.shape]).encode()
        yield array.tobytes()
