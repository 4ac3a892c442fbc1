"""Where a bundle's files lie: a folder, or one ``.hyb`` file that is read in place.

A ``.hyb`` is a zip archive with nothing compressed and every file's bytes on a 64-byte boundary,
so that the weights can be mapped into memory without being unpacked.
"""

from __future__ import annotations

import mmap
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from hybridc.bundle.tensors import ALIGNMENT
from hybridc.errors import BundleError, UsageError

SUFFIX = ".hyb"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_PADDING_ID = 0x4268
"""Identifier of the extra field that holds only padding."""


class Storage(Protocol):
    """Read access to a bundle's files."""

    @property
    def where(self) -> str:
        """The bundle's path, for messages."""

    def names(self) -> list[str]:
        """Paths of all files inside, sorted."""

    def map(self, name: str) -> memoryview:
        """A file's bytes, mapped: pages are read when touched and shared between processes."""


@dataclass(frozen=True)
class FolderStorage:
    """A bundle that is a folder."""

    path: Path

    @property
    def where(self) -> str:
        """The folder's path."""
        return str(self.path)

    def names(self) -> list[str]:
        """Paths of all files inside, sorted."""
        files = (file for file in self.path.rglob("*") if not file.is_dir())
        return sorted(file.relative_to(self.path).as_posix() for file in files)

    def map(self, name: str) -> memoryview:
        """A file's bytes, mapped privately."""
        try:
            with open(self.path / checked_name(name), "rb") as file:
                return _map_file(file.fileno())
        except OSError as error:
            raise BundleError(f"{self.where}: {name} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class ArchiveStorage:
    """A bundle that is one ``.hyb`` file.

    Attributes:
        path: The file.
        data: Its mapped bytes.
        places: Offset and length of each file inside.
    """

    path: Path
    data: memoryview
    places: dict[str, tuple[int, int]]

    @property
    def where(self) -> str:
        """The file's path."""
        return str(self.path)

    def names(self) -> list[str]:
        """Paths of all files inside, sorted."""
        return sorted(self.places)

    def map(self, name: str) -> memoryview:
        """A file's bytes, mapped privately."""
        if name not in self.places:
            raise BundleError(f"{self.where}: {name} is missing")
        offset, size = self.places[name]
        return self.data[offset : offset + size]


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """Open a bundle for reading.

    Raises:
        UsageError: Nothing is there.
        BundleError: It is neither a folder nor a ``.hyb`` archive.
    """
    place = Path(path)
    if place.is_dir():
        return FolderStorage(place)
    if not place.exists():
        raise UsageError(f"there is no bundle at {place}")
    try:
        with open(place, "rb") as file:
            data = _map_file(file.fileno())
        with zipfile.ZipFile(place) as archive:
            places = dict(_place(data, info) for info in archive.infolist())
    except (zipfile.BadZipFile, struct.error, OSError, ValueError, NotImplementedError) as error:
        raise BundleError(f"{place} is not a bundle, or damaged: {error}") from error
    return ArchiveStorage(place, data, places)


def _map_file(descriptor: int) -> memoryview:
    """Map a whole file copy-on-write: writable for consumers that insist, never written back."""
    if os.fstat(descriptor).st_size == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))


def _place(data: memoryview, info: zipfile.ZipInfo) -> tuple[str, tuple[int, int]]:
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{info.filename} is compressed")
    start = info.header_offset
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, start + 26)
    offset = start + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if offset + info.file_size > len(data):
        raise zipfile.BadZipFile(f"{info.filename} is cut off")
    return info.filename, (offset, info.file_size)


def checked_name(name: str) -> str:
    """A path inside a bundle, refused if it could lead outside."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise BundleError(f"a bundle may not name the path {name!r}")
    return name


def write_archive(folder: Path, destination: Path) -> None:
    """Write a folder as a ``.hyb`` file, the same bytes for the same contents."""
    storage = FolderStorage(folder)
    with zipfile.ZipFile(destination, "w", zipfile.ZIP_STORED) as archive:
        for name in storage.names():
            size = (folder / name).stat().st_size
            large = size >= zipfile.ZIP64_LIMIT // 2
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o644 << 16
            info.create_system = 3
            info.extra = _padding(archive.start_dir, name, large)
            with archive.open(info, "w", force_zip64=large) as target:
                target.write(storage.map(name))


def _padding(offset: int, name: str, large: bool) -> bytes:
    """An extra field that brings the file's first byte to an aligned offset."""
    fixed = _LOCAL_HEADER_BYTES + len(name.encode()) + 4 + (_ZIP64_EXTRA_BYTES if large else 0)
    count = -(offset + fixed) % ALIGNMENT
    return struct.pack("<HH", _PADDING_ID, count) + bytes(count)


@contextmanager
def staging_folder(destination: Path) -> Iterator[Path]:
    """A folder beside ``destination`` to write into; gone afterwards, whatever happens.

    Raises:
        UsageError: The folder around the destination cannot be written to.
    """
    import shutil
    import tempfile

    parent = destination.absolute().parent
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=parent))
    except OSError as error:
        raise UsageError(f"cannot write to {parent}: {error.strerror}") from error
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
