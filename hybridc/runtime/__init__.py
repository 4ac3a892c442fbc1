"""The loader. Imports numpy, tvm_ffi and ``hybridc.bundle``; nothing of the compiler."""

from hybridc.runtime.loader import Model, load

__all__ = ["Model", "load"]
