"""hybridc: ahead-of-time compiler from ONNX to bundles that a tiny loader runs.

import hybridc

model = hybridc.load("model.hyb")
outputs = model(x=array)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridc.runtime.loader import Model
    from hybridc.runtime.remote_settings import RemoteSettings

__version__ = "0.1.0"

__all__ = ["__version__", "load"]


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    remote: str | RemoteSettings | None = None,
) -> Model:
    """Load a bundle; see :func:`hybridc.runtime.load`."""
    from hybridc.runtime.loader import load as load_bundle

    return load_bundle(path, threads=threads, remote=remote)
