"""Run GPU schedules on a CPU: every loop over blocks or threads becomes a plain loop.

A scheduled function means the same whichever kind its loops have, so this finds schedules that
compute something else. It does not find barriers that stand in the wrong place, which come in only
when TVM makes source of it; for that there is :func:`divergent_barriers`.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import tvm
import tvm_ffi
from hybridc.passes.pipeline import run_passes
from hybridc.targets.cuda.architectures import parse_gpu
from hybridc.targets.cuda.build import compiled_graph
from hybridc.targets.cuda.pack import cuda_modules
from hybridc.targets.gpu.lower import lower_for_gpu
from hybridc.targets.gpu.pipeline import fuse
from hybridc.targets.gpu.schedules import schedule_module
from hybridc.targets.gpu.scratch import lift_scratch
from hybridc.targets.llvm.alignment import accept_any_alignment
from hybridc.targets.protocol import Section
from hybridc.targets.relax_pipeline import build_executable, finalize, map_kernels
from tvm import relax, tirx
from tvm.s_tir import SBlock

from hybridc.frontend.read import read_model
from hybridc.frontend.shapes import model_inputs, parse_shapes, specialize
from hybridc.lowering.lower import Lowered
from hybridc.lowering.ops import default_table
from hybridc.runtime.tensors import to_array, to_tensor
from tests.models import Array


def lowered_model(model: onnx.ModelProto, *shapes: str) -> tuple[Lowered, list[str], list[str]]:
    """A whole model lowered for a GPU, with the names of its inputs and outputs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        source = read_model(path)
        ranges = specialize(source.model, parse_shapes(shapes))
        passed, _notes = run_passes(source.model, default_table().lowers)
        graph = passed.graph
        inputs = [value for value in model_inputs(passed) if value.const_value is None]
        section = Section(list(graph), inputs, list(graph.outputs), graph.opset_imports, ranges)
        lowered = lower_for_gpu(section)
    return lowered, [str(v.name) for v in inputs], [str(v.name) for v in graph.outputs]


def as_it_is(lowered: Lowered) -> Lowered:
    """A lowered model with its weights in the order in which the model has them."""
    return lowered


def cuda_source(
    model: onnx.ModelProto, *shapes: str, pack: Callable[[Lowered], Lowered] = as_it_is
) -> str:
    """The CUDA source of a model's kernels."""
    gpu = parse_gpu("sm_90")
    module = pack(lowered_model(model, *shapes)[0]).module
    executable = build_executable(compiled_graph(module, gpu), gpu.target)
    return "\n".join(found.inspect_source("cuda") for found in cuda_modules(executable.mod))


def run_serially(
    model: onnx.ModelProto,
    feeds: dict[str, Array],
    *shapes: str,
    kernels: Callable[[tvm.IRModule], tvm.IRModule] = fuse,
    pack: Callable[[Lowered], Lowered] = as_it_is,
) -> dict[str, Array]:
    """Outputs of a model whose kernels are scheduled for a GPU and run on this CPU.

    Args:
        model: The model.
        feeds: Its inputs.
        shapes: Shapes of its inputs, as on the command line.
        kernels: From the lowered module to fused kernels.
        pack: From the lowered model to one with other weights.
    """
    gpu = parse_gpu("sm_90")
    lowered, inputs, outputs = lowered_model(model, *shapes)
    lowered = pack(lowered)
    limits = dataclasses.replace(gpu.limits, matrix_types=frozenset())  # no tensor cores here
    with gpu.target:
        module = lift_scratch(schedule_module(kernels(lowered.module), gpu.target, limits))
    module = accept_any_alignment(map_kernels(module, _serial))
    with gpu.host.target:
        executable = build_executable(finalize(module), gpu.host.target)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    weights = [to_tensor(array) for array in lowered.weights.values()]
    results = machine["main"](*[to_tensor(feeds[n]) for n in inputs], tvm_ffi.Array(weights))
    return dict(zip(outputs, map(to_array, results), strict=True))


def _serial(function: tirx.PrimFunc) -> tirx.PrimFunc:
    host: dict[Any, Any] = {}

    def note(block: SBlock) -> None:
        for buffer in block.alloc_buffers:
            if buffer.scope() != "global":
                new = tirx.decl_buffer(buffer.shape, buffer.dtype, buffer.name)
                host[buffer.__chandle__()] = new

    def unbind(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.THREAD_BINDING:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    tvm_ffi.structural_walk(function.body, (SBlock, note))
    callbacks = [
        (tirx.For, unbind),
        (tirx.Var, lambda variable: host.get(variable.__chandle__(), variable)),
    ]
    return tvm_ffi.structural_map(function, callbacks)


def divergent_barriers(source: str) -> Iterator[str]:
    """Barriers of CUDA source that stand under a condition or a loop that depends on the thread."""
    openers: list[str] = []
    for line in source.splitlines():
        text = line.strip()
        if "__syncthreads()" in text:
            yield from (opener for opener in openers if _depends_on_thread(opener))
        openers = openers[: len(openers) - text.startswith("}")]
        if text.endswith("{"):
            openers.append(text)


def _depends_on_thread(opener: str) -> bool:
    return re.match(r"(if|for|while|\} else)\b.*threadIdx", opener) is not None
