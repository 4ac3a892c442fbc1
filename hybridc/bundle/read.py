"""Read a bundle and check it: every byte that gets used is hashed first."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from hybridc.bundle.manifest import MANIFEST, FileSpec, Manifest, from_json
from hybridc.bundle.storage import Storage, open_storage
from hybridc.bundle.tensors import Array, decode
from hybridc.errors import BundleError


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest, and its files checked as they are read."""

    manifest: Manifest
    storage: Storage

    def read(self, name: str) -> memoryview:
        """A file's mapped bytes, after its size and checksum were found right.

        Raises:
            BundleError: The file is missing, not listed, or was changed.
        """
        listed = next((file for file in self.manifest.files if file.path == name), None)
        if listed is None:
            raise BundleError(f"{self.storage.where}: {name} is not listed in its manifest")
        data = self.storage.map(name)
        _check(listed, data, self.storage.where)
        return data

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
    return Bundle(manifest, storage)
