"""Where a bundle's files lie: a folder, or one ``.hyb`` file that is read in place.

A ``.hyb`` is a zip archive in which tensors are stored as they are, on a 64-byte boundary, so that
they can be mapped into memory without being unpacked. What is copied in any case, code above all,
is deflated where that saves something.
"""

from __future__ import annotations

import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from hybridc.bundle.tensors import ALIGNMENT
from hybridc.errors import BundleError, UsageError

SUFFIX = ".hyb"

MAPPED = ".safetensors"
"""Suffix of files that are never compressed, since they are read in place."""

MOST_INFLATED = 64
"""A file may be this many times as large as it is in the archive: more would be an attack."""

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
class Place:
    """Where a file is inside an archive.

    Attributes:
        offset: Of its first byte in the archive.
        stored: Bytes that it takes there.
        size: Its own bytes.
        deflated: Whether they are compressed.
    """

    offset: int
    stored: int
    size: int
    deflated: bool


@dataclass(frozen=True)
class ArchiveStorage:
    """A bundle that is one ``.hyb`` file.

    Attributes:
        path: The file.
        data: Its mapped bytes.
        places: Where each file inside is.
    """

    path: Path
    data: memoryview
    places: dict[str, Place]

    @property
    def where(self) -> str:
        """The file's path."""
        return str(self.path)

    def names(self) -> list[str]:
        """Paths of all files inside, sorted."""
        return sorted(self.places)

    def map(self, name: str) -> memoryview:
        """A file's bytes, mapped privately, or inflated if they are compressed."""
        if name not in self.places:
            raise BundleError(f"{self.where}: {name} is missing")
        place = self.places[name]
        data = self.data[place.offset : place.offset + place.stored]
        if not place.deflated:
            return data
        try:
            return memoryview(_inflated(data, place.size))
        except zlib.error as error:
            raise BundleError(f"{self.where}: {name} is damaged: {error}") from error


def _inflated(data: memoryview, size: int) -> bytes:
    """Decompress a file of a known size; never more than that."""
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    content = stream.decompress(data, size + 1)
    if len(content) != size or not stream.eof or stream.unused_data:
        raise zlib.error("its size is not the one that the archive gives")
    return content


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


def _place(data: memoryview, info: zipfile.ZipInfo) -> tuple[str, Place]:
    deflated = info.compress_type == zipfile.ZIP_DEFLATED
    if info.compress_type != zipfile.ZIP_STORED and not deflated:
        raise zipfile.BadZipFile(f"{info.filename} is compressed in an unknown way")
    if deflated and info.filename.endswith(MAPPED):
        raise zipfile.BadZipFile(f"{info.filename} is compressed")
    if info.file_size > info.compress_size * (MOST_INFLATED if deflated else 1):
        raise zipfile.BadZipFile(f"{info.filename} is too large for what is stored of it")
    start = info.header_offset
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, start + 26)
    offset = start + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if offset + info.compress_size > len(data):
        raise zipfile.BadZipFile(f"{info.filename} is cut off")
    return info.filename, Place(offset, info.compress_size, info.file_size, deflated)


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
            content = storage.map(name)
            if not large and _pays(name, content):
                info.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(info, "w", force_zip64=large) as target:
                target.write(content)


def _pays(name: str, content: memoryview) -> bool:
    """Whether a file may be compressed and becomes smaller, but not suspiciously small."""
    if name.endswith(MAPPED):
        return False
    stream = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, -zlib.MAX_WBITS)
    size = len(stream.compress(content)) + len(stream.flush())
    return size < len(content) <= size * MOST_INFLATED


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
