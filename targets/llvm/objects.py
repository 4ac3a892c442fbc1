"""Machine code of kernels, an object file for each.

An object depends on its kernel, the CPU, and the code that schedules and compiles it, and on
nothing else of the model. So objects that an earlier compile made can be taken from a cache, whose
keys name all of these. The others are made side by side: TVM and LLVM let go of Python's lock.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import tvm
import tvm_ffi
from hybridc.targets.llvm.alignment import accept_any_alignment
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.detach import Kernel
from hybridc.targets.llvm.object_cache import ObjectCache
from hybridc.targets.llvm.schedules import schedule_function

import hybridc

MAX_WORKERS = 8
"""Threads that compile at once; each holds a kernel in LLVM's form."""


def build_objects(
    kernels: Mapping[str, Kernel],
    cpu: Cpu,
    cache: ObjectCache | None = None,
    workers: int | None = None,
) -> dict[str, bytes]:
    """Object files by symbol, in the order of the kernels.

    The bytes are the same with and without a cache, and for any number of workers.

    Args:
        kernels: What to compile, by symbol.
        cpu: The processor.
        cache: Where objects are kept.
        workers: Threads; as many as there are cores if not given.
    """
    made_with = _made_with(cpu)
    keys = {symbol: _key(kernel, made_with) for symbol, kernel in kernels.items()}
    kept = {symbol: cache.read(key) if cache else None for symbol, key in keys.items()}
    missing = [kernels[symbol] for symbol, data in kept.items() if data is None]
    built = dict(zip((k.symbol for k in missing), _build_all(missing, cpu, workers), strict=True))
    if cache and built:
        for symbol, data in built.items():
            cache.write(keys[symbol], data)
        cache.trim()
    return {symbol: built[symbol] if data is None else data for symbol, data in kept.items()}


def _build_all(kernels: list[Kernel], cpu: Cpu, workers: int | None) -> list[bytes]:
    cores = len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(workers or min(cores, MAX_WORKERS))
    try:
        return list(pool.map(lambda kernel: build_object(kernel, cpu), kernels))
    finally:
        pool.shutdown(cancel_futures=True)


def build_object(kernel: Kernel, cpu: Cpu) -> bytes:
    """Schedule a kernel and compile it to an object file."""
    with cpu.target:
        function = schedule_function(kernel.function, cpu)
        function = function.with_attr("global_symbol", kernel.symbol)
        module = accept_any_alignment(tvm.IRModule({kernel.symbol: function}))
        library = tvm.tirx.build(module, target=cpu.target)
    with tempfile.TemporaryDirectory(prefix="hybridc-") as folder:
        path = Path(folder) / "kernel.o"
        library.write_to_file(str(path))
        return path.read_bytes()


def _key(kernel: Kernel, made_with: str) -> str:
    # The text is what people read; the hash of the structure covers every bit of every number.
    structure = tvm_ffi.structural_hash(kernel.function)
    content = f"{made_with}\n{kernel.symbol}\n{structure}\n{kernel.text}"
    return hashlib.sha256(content.encode()).hexdigest()


def _made_with(cpu: Cpu) -> str:
    """All that an object depends on beside its kernel, as text."""
    library = Path(tvm.__file__).parent / "lib" / "libtvm_compiler.so"
    status = library.stat()
    parts = [
        hybridc.__version__,
        *(f"{name} {version(name)}" for name in ("apache-tvm", "apache-tvm-ffi", "numpy")),
        f"{status.st_size} {status.st_mtime_ns}",
        _source_digest(),
        repr(cpu),
        str(cpu.target),
        *sorted(cpu.llvm_features),
    ]
    return "\n".join(parts)


def _source_digest() -> str:
    """Hash of the code that schedules and compiles kernels."""
    targets = Path(__file__).parents[1]
    files = [*targets.glob("*.py"), *(targets / "llvm").rglob("*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        data = file.read_bytes()
        digest.update(f"{file.relative_to(targets)} {len(data)}\n".encode() + data)
    return digest.hexdigest()
