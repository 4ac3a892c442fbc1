"""Write a bundle: files into a staging folder, the manifest last, one rename at the end."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hybridc.bundle.manifest import MANIFEST, FileSpec, Manifest, to_json
from hybridc.bundle.storage import SUFFIX, Pack, checked_name, open_storage, write_archive
from hybridc.errors import UsageError


@dataclass
class BundleWriter:
    """Collects the files of one bundle in a staging folder.

    Attributes:
        folder: The staging folder; becomes the bundle.
        files: What was written so far, by path.
    """

    folder: Path
    files: dict[str, FileSpec] = field(default_factory=dict)

    def put(self, name: str, chunks: Iterable[bytes | memoryview]) -> str:
        """Write one file and note its checksum; returns its path inside the bundle."""
        path = self.folder / checked_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        self.files[name] = FileSpec(name, size, digest.hexdigest())
        return name

    def finish(self, manifest: Manifest) -> Manifest:
        """Write the manifest with the list of files; returns it as written."""
        files = tuple(self.files[name] for name in sorted(self.files))
        complete = dataclasses.replace(manifest, files=files)
        (self.folder / MANIFEST).write_bytes(to_json(complete))
        return complete


def publish(folder: Path, destination: Path, pack: Pack | None = None) -> None:
    """Move a finished staging folder to its place, as a folder or as a ``.hyb`` file.

    A bundle that was there before is replaced, and stays until the new one is complete.

    Args:
        folder: The staging folder.
        destination: Its place.
        pack: How code is packed, see :func:`write_archive`.

    Raises:
        UsageError: Something that is not a bundle is in the way.
    """
    check_destination(destination)
    finished = folder
    if destination.suffix == SUFFIX:
        finished = folder / destination.name
        content = folder / "content"
        content.mkdir()
        for child in list(folder.iterdir()):
            if child != content:
                child.rename(content / child.name)
        write_archive(content, finished, pack)
        os.replace(finished, destination)
        return
    finished.chmod(0o755)
    if destination.exists():
        old = folder.with_name(folder.name + ".old")
        destination.rename(old)
        finished.rename(destination)
        shutil.rmtree(old, ignore_errors=True)
    else:
        finished.rename(destination)


def check_destination(destination: Path) -> None:
    """Refuse a destination that cannot be written, or that holds something other than a bundle."""
    parent = destination.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"cannot write to {parent}: it is not a folder; make it or choose another")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {parent}: permission denied")
    wants_file = destination.suffix == SUFFIX
    if not destination.exists() or (destination.is_file() and wants_file):
        return
    if destination.is_dir() and not wants_file:
        names = open_storage(destination).names()
        if not names or MANIFEST in names:
            return
    raise UsageError(
        f"{destination} is in the way and is not a bundle of that form; choose another -o"
    )


def storage_error(error: OSError, destination: Path) -> UsageError:
    """The user's sentence for a failure of the file system while writing."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = "the disk is full" if full else (error.strerror or str(error))
    return UsageError(f"{destination} was not written: {reason}; nothing was left behind")
