"""Packed code that is kept for later compiles: the runtime's libraries are in every bundle.

Packing them by LZMA takes longer than all else of a small model's compile.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

from hybridc.bundle.storage import Pack, pack_code
from hybridc.targets.llvm.object_cache import ObjectCache

LARGE = 1 << 20
"""Bytes from which on packed code is kept; less is packed at once."""


def keeping(folder: Path | None) -> Pack:
    """What packs code, or takes it out of a folder of kernels where an earlier compile packed it.

    Args:
        folder: The folder; ``None`` keeps nothing.
    """
    if folder is None:
        return pack_code
    cache = ObjectCache(folder)

    def pack(code: memoryview) -> bytes | None:
        if len(code) < LARGE:
            return pack_code(code)
        # Another version of Python may bring another liblzma, whose bytes may differ.
        digest = hashlib.sha256(f"packed by {platform.python_version()}\n".encode())
        digest.update(code)
        key = digest.hexdigest()
        packed = cache.read(key)
        if packed is None:
            packed = pack_code(code)
            if packed is not None:
                cache.write(key, packed)
                cache.trim()
        return packed

    return pack
