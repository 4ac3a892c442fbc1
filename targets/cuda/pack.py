"""Put compiled device code into a library, in place of the CUDA source that TVM would store.

TVM's CUDA runtime needs a driver to load, so on a machine without one the code generator leaves
the kernels' source in the library, and the loading machine would need a compiler. But the runtime
that reads a library takes machine code just as well. So the section that holds the imported
modules is made by TVM, rewritten here, and handed back to be linked.

    section  = u64 bytes behind this | u64[] rows | u64[] children | module*
    module   = string kind | string content, and no content for the kind ``_lib``
    content  = string format | functions | string code             of the kind ``cuda``
    string   = u64 length | bytes

What stands for the functions is copied as it is; its end is found by the length of the source.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from hybridc.targets.llvm.cpu import Cpu

from hybridc.errors import InternalError

FORMAT = "fatbin"

Compile = Callable[[str], bytes]


def packer(compile_source: Compile, cpu: Cpu) -> Callable[..., str]:
    """A function for ``export_library`` that packs the imports with compiled device code.

    Args:
        compile_source: From CUDA source to a fat binary.
        cpu: The host.
    """

    def pack(module: Any, is_system_library: bool, prefix: str, folder: str) -> str:
        section = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")(module)
        data = np.from_dlpack(section).tobytes()
        changed = rewrite(
            data, [m.inspect_source("cuda") for m in cuda_modules(module)], compile_source
        )
        target = json.dumps({"kind": "llvm", "mtriple": cpu.triple, "mcpu": cpu.llvm_name})
        blob = tvm_ffi.get_global_func("codegen.codegen_blob")
        path = str(Path(folder) / "imports.o")
        blob(changed, is_system_library, target, prefix).write_to_file(path, "o")
        return path

    return pack


def cuda_modules(module: Any) -> Iterator[Any]:
    """The modules with device code among a module and what it imports."""
    if module.kind == "cuda":
        yield module
    for imported in module.imports:
        yield from cuda_modules(imported)


def rewrite(section: bytes, sources: list[str], compile_source: Compile) -> bytes:
    """A section with every CUDA source in it replaced by its machine code.

    Args:
        section: As TVM packs it.
        sources: The sources that are in it.
        compile_source: From CUDA source to a fat binary.
    """
    reader = _Reader(section)
    if reader.number() != len(section) - 8:
        raise InternalError("TVM packs imported modules in a form that is not known")
    rows = reader.take(8 * reader.number(peek=True) + 8)
    children = reader.take(8 * reader.number(peek=True) + 8)
    written = [rows, children]
    while not reader.at_end:
        kind = reader.string()
        written.append(_string(kind))
        if kind == b"_lib":
            continue
        content = reader.string()
        if kind == b"cuda":
            content = _compiled(content, sources, compile_source)
        written.append(_string(content))
    body = b"".join(written)
    return struct.pack("<Q", len(body)) + body


def _compiled(content: bytes, sources: list[str], compile_source: Compile) -> bytes:
    reader = _Reader(content)
    form = reader.string()
    for source in sources:
        code = _string(source.encode())
        if form == b"cuda" and content.endswith(code):
            functions = content[reader.position : len(content) - len(code)]
            return _string(FORMAT.encode()) + functions + _string(compile_source(source))
    raise InternalError(f"TVM stores device code in a form that is not known: {form!r}")


def _string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


class _Reader:
    """Reads numbers and strings off bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    @property
    def at_end(self) -> bool:
        return self.position == len(self.data)

    def number(self, peek: bool = False) -> int:
        (value,) = struct.unpack_from("<Q", self.data, self.position)
        self.position += 0 if peek else 8
        return int(value)

    def take(self, count: int) -> bytes:
        taken = self.data[self.position : self.position + count]
        self.position += count
        return taken

    def string(self) -> bytes:
        return self.take(self.number())
