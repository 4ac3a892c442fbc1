"""The plug-in for users of TVM itself: an entry point of the group ``tvm.backends``.

``import tvm`` calls :func:`register`. The plug-in is loaded if it has been built, by compiling a
bundle or by ``python -m hybridc.targets.opencl``; nothing is built while TVM is imported.
"""

from __future__ import annotations

import ctypes
import platform

from hybridc.targets.opencl.plugin import built_path


def register() -> None:
    """Load the plug-in into a process that has imported TVM, if it has been built."""
    path = built_path(platform.machine())
    if path.exists():
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
