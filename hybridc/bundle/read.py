"""Read a bundle and check it: every byte that gets used is hashed first."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from hybridc.bundle.manifest import MANIFEST, FileSpec, Manifest, from_json
from hybridc.bundle.storage import Storage, open_storage
from hybridc.bundle.tensors import Array, decode
from hybridc.errors import BundleError


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest, and its files checked as they are read.

    Attributes:
        manifest: Its description.
        storage: Its files.
        checked: Mapped bytes of the files that were found right, each of which is hashed once.
    """

    manifest: Manifest
    storage: Storage
    checked: dict[str, memoryview] = field(default_factory=dict, repr=False, compare=False)

    @property
    def digest(self) -> str:
        """The digest that the manifest's text ends with; it was found right on opening."""
        return str(json.loads(bytes(self.storage.map(MANIFEST)))["digest"])

    def read(self, name: str) -> memoryview:
        """A file's mapped bytes, after its size and checksum were found right.

        Raises:
            BundleError: The file is missing, not listed, or was changed.
        """
        if name not in self.checked:
            data = self.storage.map(name)
            _check(self._listed(name), data, self.storage.where)
            self.checked[name] = data
        return self.checked[name]

    def read_code(self, name: str) -> bytes:
        """A library's bytes as a private copy: what was checked cannot change before it is loaded.

        Raises:
            BundleError: The file is missing, not listed, or was changed.
        """
        data = bytes(self.storage.map(name))
        _check(self._listed(name), memoryview(data), self.storage.where)
        return data

    def _listed(self, name: str) -> FileSpec:
        for file in self.manifest.files:
            if file.path == name:
                return file
        raise BundleError(f"{self.storage.where}: {name} is not listed in its manifest")

    def tensors(self, name: str) -> dict[str, Array]:
        """Tensors of a file, each a view of the mapped bytes."""
        return decode(self.read(name), f"{self.storage.where}: {name}")

    def check_all(self) -> None:
        """Check every file, and that there is no other.

        Raises:
            BundleError: A file is missing, was changed, or was added.
        """
        for file in self.manifest.files:
            self.read(file.path)
        listed = {MANIFEST, *(file.path for file in self.manifest.files)}
        added = sorted(set(self.storage.names()) - listed)
        if added:
            raise BundleError(f"{self.storage.where} holds files that it does not list: {added}")


def _check(listed: FileSpec, data: memoryview, where: str) -> None:
    if len(data) == listed.bytes and hashlib.sha256(data).hexdigest() == listed.sha256:
        return
    raise BundleError(
        f"{where}: {listed.path} was changed after the bundle was written (its checksum does "
        "not fit); compile the model again or fetch the bundle anew"
    )


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle and read its manifest.

    Raises:
        UsageError: Nothing is there.
        BundleError: It is not a bundle, damaged, or of a newer schema.
    """
    storage = open_storage(path)
    if MANIFEST not in storage.names():
        raise BundleError(f"{storage.where} is not a bundle: it has no {MANIFEST}")
    manifest = from_json(bytes(storage.map(MANIFEST)), f"{storage.where}: {MANIFEST}")
    fault = next((fault for way in manifest.ways() for fault in _loose_ends(way)), None)
    if fault is not None:
        raise BundleError(f"{storage.where}: {MANIFEST} does not fit together: {fault}")
    return Bundle(manifest, storage)


def _loose_ends(manifest: Manifest) -> Iterator[str]:
    """What a manifest refers to and does not hold."""
    devices = {device.name for device in manifest.devices}
    for parts in (manifest.parts, *(plan.parts for plan in manifest.plans)):
        tensors = {spec.name for spec in manifest.inputs}
        for part in parts:
            if part.device not in devices:
                yield f"{part.name} is on {part.device}, which is none of its devices"
            yield from (f"{part.name} reads {name}" for name in part.inputs if name not in tensors)
            tensors.update(part.outputs)
        outputs = {spec.name for spec in manifest.outputs} - tensors
        yield from (f"no part computes the output {name}" for name in sorted(outputs))
    dims = {dim for spec in manifest.inputs for dim in spec.shape if isinstance(dim, str)}
    yield from (f"{dim} has no range" for dim in sorted(dims - manifest.dimensions.keys()))
    architectures = {device.architecture for device in manifest.devices if device.architecture}
    missing = architectures - manifest.runtime.keys()
    yield from (f"it has no runtime for {name}" for name in sorted(missing))
    files = {file.path for file in manifest.files}
    yield from (f"it does not list {name}" for name in _used_files(manifest) if name not in files)


def _used_files(manifest: Manifest) -> Iterator[str]:
    yield manifest.weights
    for parts in (manifest.parts, *(plan.parts for plan in manifest.plans)):
        local = (part for part in parts if part.remote is None)
        yield from (name for part in local for name in (part.library, *part.companions))
    yield from (name for names in manifest.runtime.values() for name in names)
    yield from (name for sample in manifest.samples for name in (sample.inputs, sample.outputs))
