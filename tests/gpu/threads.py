"""Run the CUDA source of a kernel's threads on a CPU, barriers and products of warps included.

The source is compiled as C++ against ``threads.h``. What stands there for the instruction of tensor
cores follows the table of PTX: which lane holds which elements.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import tvm
import tvm_ffi
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.cuda.pack import cuda_modules
from hybridc.targets.relax_pipeline import build_executable
from tvm import tirx

from tests.models import Array

_KERNEL = re.compile(
    r'extern "C" __global__ void __launch_bounds__\((\d+)\) (\w+)\(([^)]*)\) \{', re.M
)
_FIRST = re.compile(
    r'^(?=(?:template <typename Element>\n)?__device__ __forceinline__ |extern "C" __global__ )',
    re.M,
)
_PRODUCT = re.compile(
    r'asm(?: volatile)?\("mma\.sync[^"]*?\.(\w+)\.(\w+)\.(?:f32|s32) "[^;]*;"'
    r'.*?"r"\((b\[.*?)\), .*?\)\);',
    re.S,
)
_LOAD = re.compile(
    r'asm volatile\(\s*"ldmatrix[\w.]*?(\.trans)?\.shared[^;]*;"\s*'
    r': "=r"\((\w+(?:\[\w+\])?)\[0\]\).*?'
    r'__cvta_generic_to_shared\((.*?)\)\)\) : "memory"\);',
    re.S,
)
_ROUND = re.compile(r'asm\("cvt\.rna\.tf32\.f32 %0, %0;" : "\+r"\((.*?)\)\);')
_PAIR = re.compile(
    r'asm\("cvt\.rn\.f16x2\.f32 [^;]*;" : "=r"\((.*?)\) : "f"\((.*?)\), "f"\((.*?)\)\);'
)
_NUMBERS = {"f16": "half", "tf32": "float", "s8": "int8_t", "u8": "uint8_t"}
_MOST_SHARED = 96 * 1024


def source_of(function: tirx.PrimFunc) -> str:
    """The CUDA source of a scheduled function."""
    gpu = parse_gpu("sm_90")
    named = function.with_attr("global_symbol", "main")
    executable = build_executable(tvm.IRModule({"main": named}), gpu.target)
    return "\n".join(found.inspect_source("cuda") for found in cuda_modules(executable.mod))


def grids_of(function: tirx.PrimFunc) -> list[int]:
    """Blocks of each kernel of a scheduled function, in order."""
    found: list[int] = []

    def note(loop: tirx.For) -> None:
        bound = loop.kind == tirx.ForKind.THREAD_BINDING
        if bound and loop.thread_binding.thread_tag == "blockIdx.x":
            found.append(int(loop.extent))

    tvm_ffi.structural_walk(function.body, (tirx.For, note))
    return found


def run_threads(source: str, grids: list[int], tensors: Mapping[str, Array], folder: Path) -> None:
    """Run kernels one after the other; changes the tensors that they write.

    Args:
        source: CUDA source.
        grids: Blocks of each kernel.
        tensors: Arrays by the names of the kernels' parameters.
        folder: Where to compile.
    """
    kernels = _KERNEL.findall(source)
    assert len(kernels) == len(grids)
    begin = _FIRST.search(source).start()
    shared = re.sub(r"__shared__ (alignas\(\d+\))", r"\1 static", source[begin:])
    dynamic = rf"alignas(64) static uint \1[{_MOST_SHARED // 4}];"
    shared = re.sub(r"extern __shared__ __align__\(64\) uint (\w+)\[\];", dynamic, shared)
    shared = _LOAD.sub(_load, _PAIR.sub(r"machine::pack(\1, \3, \2);", shared))
    body = _PRODUCT.sub(_product, _ROUND.sub(r"round_to_tf32(\1);", shared))
    launches = [_launch(number, *kernel) for number, kernel in enumerate(kernels)]
    text = folder / "kernel.cpp"
    text.write_text("\n".join([f'#include "{_HEADER}"', body, *launches]))
    library = folder / "kernel.so"
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(text)]
    subprocess.run(command, check=True)
    functions = ctypes.CDLL(str(library))
    for number, (kernel, blocks) in enumerate(zip(kernels, grids, strict=True)):
        names = [part.split()[-1].removesuffix("_ptr") for part in kernel[2].split(",")]
        pointers = (ctypes.c_void_p * len(names))(*(tensors[n].ctypes.data for n in names))
        assert getattr(functions, f"launch_{number}")(pointers, blocks) == 0, "barriers"


_HEADER = Path(__file__).with_name("threads.h")


def _product(match: re.Match[str]) -> str:
    left, right = (_NUMBERS[match[index]] for index in (1, 2))
    return f"machine::multiply<{left}, {right}>(c, a[row], &{match[3]});"


def _load(match: re.Match[str]) -> str:
    turned = "transposed_" if match[1] else ""
    return f"machine::load_{turned}fragments({match[2]}, {match[3]});"


def _launch(number: int, threads: str, name: str, parameters: str) -> str:
    types = [part.split("*")[0].strip() for part in parameters.split(",")]
    arguments = ", ".join(f"({dtype}*)arguments[{i}]" for i, dtype in enumerate(types))
    return f"""
static void** arguments_{number};
static void body_{number}() {{ void** arguments = arguments_{number}; {name}({arguments}); }}
extern "C" int launch_{number}(void** arguments, int blocks) {{
  arguments_{number} = arguments;
  for (machine::block.x = 0; machine::block.x < blocks; ++machine::block.x)
    if (machine::run_block({threads}, body_{number})) return 1;
  return 0;
}}
"""
