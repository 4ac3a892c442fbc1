"""Where a bundle's files lie: a folder, or one ``.hyb`` file that is read in place.

A ``.hyb`` is a zip archive. Large tensors are stored as they are, on a 64-byte boundary, so that
they can be mapped into memory without being unpacked. What is copied in any case takes less:

    code      NAME.xz: LZMA, of x86 code with its jumps as absolute addresses (the BCJ filter)
    tensors   deflated, if they are few bytes and that saves a tenth, as it does of integers
    text      deflated

The reader takes each file in any of these forms, in an archive and in a folder.
"""

from __future__ import annotations

import lzma
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np

from hybridc.bundle.tensors import ALIGNMENT
from hybridc.errors import BundleError, UsageError

SUFFIX = ".hyb"

MAPPED = ".safetensors"
"""Suffix of files that are read in place if they are not compressed."""

CODE, PACKED = ".so", ".xz"
"""Suffix of code, and what is added to it where the code is compressed by LZMA."""

MOST_INFLATED, SMALL = 64, 16 << 20
"""A file may be this many times as large as it is in the archive, or as large as this many bytes:
more would be an attack."""

MOST_DEFLATED, LEAST_SAVED = 4 << 20, 0.1
"""Bytes of tensors up to which unpacking takes no longer than that of the TVM runtime, and the
share that it must save. Larger ones are mapped, and shared by the processes that do."""

_BLOCK = 1 << 14
"""Bytes that share a Huffman code, nearly."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
_LOCAL_HEADER_BYTES = 30
_ZIP64_EXTRA_BYTES = 20
_PADDING_ID = 0x4268
"""Identifier of the extra field that holds only padding."""


Pack = Callable[[memoryview], "bytes | None"]
"""From code to the same packed, or to nothing where that does not pay."""


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
        names = {file.relative_to(self.path).as_posix() for file in files}
        return sorted(
            n if n.removesuffix(PACKED) in names else n.removesuffix(PACKED) for n in names
        )

    def map(self, name: str) -> memoryview:
        """A file's bytes, mapped privately, or unpacked if only the packed file is there."""
        path = self.path / checked_name(name)
        packed = path.with_name(path.name + PACKED)
        is_packed = packed.exists() and not path.exists()
        try:
            with open(packed if is_packed else path, "rb") as file:
                data = _map_file(file.fileno())
                return _unpacked(data) if is_packed else data
        except lzma.LZMAError as error:
            raise BundleError(f"{self.where}: {name} is damaged: {error}") from error
        except OSError as error:
            raise BundleError(f"{self.where}: {name} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Place:
    """Where a file is inside an archive.

    Attributes:
        offset: Of its first byte in the archive.
        stored: Bytes that it takes there.
        size: Bytes that come of them; of code packed by LZMA, only unpacking tells.
        deflated: Whether they are deflated.
        packed: Whether they are packed by LZMA.
    """

    offset: int
    stored: int
    size: int
    deflated: bool
    packed: bool = False


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
        """A file's bytes, mapped privately, or unpacked if they are compressed."""
        if name not in self.places:
            raise BundleError(f"{self.where}: {name} is missing")
        place = self.places[name]
        data = self.data[place.offset : place.offset + place.stored]
        try:
            if place.packed:
                return _unpacked(data)
            return _inflated(data, place.size) if place.deflated else data
        except (zlib.error, lzma.LZMAError) as error:
            raise BundleError(f"{self.where}: {name} is damaged: {error}") from error


def _inflated(data: memoryview, size: int) -> memoryview:
    """Inflate a file of a known size into memory that begins at a page; never more than that."""
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    content = stream.decompress(data, size + 1)
    if len(content) != size or not stream.eof or stream.unused_data:
        raise zlib.error("its size is not the one that the archive gives")
    if not size:
        return memoryview(b"")
    pages = mmap.mmap(-1, size)
    pages.write(content)
    return memoryview(pages)


def _unpacked(data: memoryview) -> memoryview:
    """Unpack code that LZMA compressed, up to what a file may become."""
    stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    content = stream.decompress(data, max(SMALL, MOST_INFLATED * len(data)))
    if not stream.eof or stream.unused_data:
        raise lzma.LZMAError("it is cut off, or too large for what is stored of it")
    return memoryview(content)


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
    most = max(SMALL, info.compress_size * MOST_INFLATED) if deflated else info.compress_size
    if info.file_size > most:
        raise zipfile.BadZipFile(f"{info.filename} is too large for what is stored of it")
    start = info.header_offset
    name_bytes, extra_bytes = struct.unpack_from("<HH", data, start + 26)
    offset = start + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if offset + info.compress_size > len(data):
        raise zipfile.BadZipFile(f"{info.filename} is cut off")
    packed = info.filename.endswith(PACKED)
    name = info.filename.removesuffix(PACKED)
    return name, Place(offset, info.compress_size, info.file_size, deflated, packed)


def checked_name(name: str) -> str:
    """A path inside a bundle, refused if it could lead outside."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise BundleError(f"a bundle may not name the path {name!r}")
    return name


def write_archive(folder: Path, destination: Path, pack: Pack | None = None) -> None:
    """Write a folder as a ``.hyb`` file, the same bytes for the same contents.

    Args:
        folder: What to write.
        destination: The file.
        pack: Gives what :func:`pack_code` does, which is used without it.
    """
    storage = FolderStorage(folder)
    with zipfile.ZipFile(destination, "w", zipfile.ZIP_STORED) as archive:
        for name in storage.names():
            _add(archive, name, storage.map(name), pack or pack_code)


def _add(archive: zipfile.ZipFile, name: str, content: memoryview, pack: Pack) -> None:
    """Write one file to an archive, in the form for its kind."""
    packed = pack(content) if name.endswith(CODE) else None
    if packed is not None:
        name, content = name + PACKED, memoryview(packed)
    large = len(content) >= zipfile.ZIP64_LIMIT // 2
    info = zipfile.ZipInfo(name, _EPOCH)
    info.external_attr = 0o644 << 16
    info.create_system = 3
    info.extra = _padding(archive.start_dir, name, large)
    if not name.endswith((CODE, PACKED)) and _pays(name, content):
        info.compress_type = zipfile.ZIP_DEFLATED
    with archive.open(info, "w", force_zip64=large) as target:
        target.write(content)


def pack_code(code: memoryview) -> bytes | None:
    """Code packed by LZMA; ``None`` if that saves nothing, or suspiciously much."""
    chain = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": lzma.PRESET_DEFAULT}]
    packed = lzma.compress(code, lzma.FORMAT_XZ, filters=chain)
    fits = len(packed) < len(code) <= max(SMALL, MOST_INFLATED * len(packed))
    return packed if fits else None


def _pays(name: str, content: memoryview) -> bool:
    """Whether tensors or text are to be deflated."""
    if not name.endswith(MAPPED):
        return 0 < len(content) <= SMALL
    if not 0 < len(content) <= MOST_DEFLATED:
        return False
    blocks = range(0, len(content), _BLOCK)
    bits = sum(_bits(content[at : at + _BLOCK]) for at in blocks)
    return bits <= 8 * (1 - LEAST_SAVED) * len(content)


def _bits(block: memoryview) -> float:
    """Bits that a block of bytes takes in a Huffman code, nearly: its entropy."""
    counts = np.bincount(np.frombuffer(block, np.uint8))
    counts = counts[counts > 0]
    return float(counts @ np.log2(len(block) / counts))


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
