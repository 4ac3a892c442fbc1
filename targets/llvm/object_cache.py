"""A folder of object files, each under the hash of all that it was made from.

A file is a checksum and the object. The checksum covers the name, too, so that a file that was cut,
changed or renamed is taken for missing; so is one that another user could have written, since what
is kept here ends up in bundles. Files are moved into place when they are complete: several compiles
may share a folder. When it has grown too large, what was used least recently goes first.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridc.targets.llvm.runtime_library import cache_folder

VARIABLE = "HYBRIDC_KERNEL_CACHE"
LIMIT = 512 * 2**20
_SUFFIX = ".kernel"
_CHECKSUM_BYTES = hashlib.sha256().digest_size


def default_folder() -> Path | None:
    """The user's folder of kernels; ``None`` if the environment asks for none."""
    chosen = os.environ.get(VARIABLE)
    if chosen is None:
        return cache_folder() / "kernels"
    return Path(chosen) if chosen else None


@dataclass(frozen=True)
class ObjectCache:
    """Object files that were built before.

    A folder that cannot be written is only read; one that cannot be read is an empty one.

    Attributes:
        folder: Where they are. It is made when it is first written to.
        limit: Most bytes that :meth:`trim` leaves there.
    """

    folder: Path
    limit: int = LIMIT

    def read(self, key: str) -> bytes | None:
        """The object kept under a key, which is used from now on; ``None`` if there is none."""
        path = self._path(key)
        try:
            content = _read_own(path)
        except OSError:
            return None
        checksum, data = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
        if checksum != _checksum(key, data):
            return None
        with suppress(OSError):
            os.utime(path)
        return data

    def write(self, key: str, data: bytes) -> None:
        """Keep an object under a key."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self._path(key), _checksum(key, data) + data)

    def trim(self) -> None:
        """Remove what was used least recently until the limit is kept."""
        total = 0
        for _, size, path in sorted(self._files(), reverse=True):
            total += size
            if total > self.limit:
                with suppress(OSError):
                    path.unlink()

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of last use, size and path of each file, those of broken-off writes included."""
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if _SUFFIX not in entry.name:
                    continue
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime_ns, status.st_size, Path(entry.path)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"


def _checksum(key: str, data: bytes) -> bytes:
    return hashlib.sha256(key.encode() + data).digest()


def _read_own(path: Path) -> bytes:
    """A regular file of this user that nobody else may write; nothing if it is anything else."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return file.read() if own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else b""


def _replace(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
