"""What all targets that TVM compiles for do with a Relax module around their schedules."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import tvm
import tvm_ffi
from hybridc.targets.offsets import take_shifts_out
from tvm import relax, s_tir, tirx

Link: TypeAlias = Callable[..., None]

_AS_SOURCE = "TVM_COMPILE_FORCE_FALLBACK"

MAX_FUSED = 64
"""Most tensor programs of one kernel. Scheduling takes a time that grows with the square of it, and
memory that is saved between so many of them is nothing beside what they compute."""

_ELEMENTWISE, _OPAQUE = 0, 8
"""TVM's numbers of the patterns of functions that are fused with the one before them, and of those
that are not fused with others."""

RESHAPE = "hybridc.reshape"
"""Attribute of a kernel that is a reshape and nothing else."""

_RESHAPE_BLOCK = "T_reshape"

MOVES = "hybridc.moves"
"""Attribute of a tensor program that changes a layout which the kernel before it may store in: it
counts as one that works element by element."""


def rewrite_main(
    builder: relax.BlockBuilder,
    module: tvm.IRModule,
    block: Callable[[Any], Any],
    parameters: Sequence[Any] | None = None,
) -> tvm.IRModule:
    """A module with ``main`` written anew, without what nobody reads then.

    Args:
        builder: Holds the module's functions, new ones included.
        module: The module as it was.
        block: From each block of bindings of ``main`` to its new form.
        parameters: Those of the new ``main``, if they change.
    """
    main = module["main"]
    body = relax.SeqExpr(list(map(block, main.body.blocks)), main.body.body)
    parameters = main.params if parameters is None else parameters
    function = relax.Function(parameters, body, main.ret_ty, main.is_pure, main.attrs)
    builder.update_func(module.get_global_var("main"), function)
    return relax.transform.DeadCodeElimination()(builder.finalize())


def with_attribute(
    module: tvm.IRModule, results: Collection[Any], name: str, value: Any
) -> tvm.IRModule:
    """The module in which some calls are of tensor programs that have an attribute.

    Other calls of the same programs stay as they are.

    Args:
        module: Tensor programs, and ``main``, which calls them.
        results: What ``main`` binds the calls' results to.
        name: The attribute.
        value: Its value.
    """
    if not results:
        return module
    builder = relax.BlockBuilder(module)
    declared: dict[Any, Any] = {}

    def call(old: Any) -> Any:
        variable = old.args[0]
        if variable not in declared:
            function = module[variable].with_attr(name, value)
            declared[variable] = builder.add_func(function, variable.name_hint)
        return relax.call_tir(declared[variable], old.args[1], old.ty_args[0])

    def block(old: Any) -> Any:
        return type(old)(
            [
                relax.VarBinding(b.var, call(b.value)) if b.var in results else b
                for b in old.bindings
            ]
        )

    return rewrite_main(builder, module, block)


def map_kernels(
    module: tvm.IRModule, change: Callable[[tirx.PrimFunc], tirx.PrimFunc]
) -> tvm.IRModule:
    """The module with each tensor program changed, and its Relax functions as they are."""
    functions = {
        variable: change(function) if isinstance(function, tirx.PrimFunc) else function
        for variable, function in module.functions.items()
    }
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def fuse(module: tvm.IRModule, native_bfloat16: bool = False) -> tvm.IRModule:
    """Fuse tensor programs into kernels.

    Args:
        module: Tensor programs and the graph that calls them.
        native_bfloat16: Whether the device computes with bfloat16. Where it does not, TVM computes
            in float32 and rounds nothing but what is stored. So such results end a kernel.
    """
    annotated = relax.transform.AnnotateTIROpPattern()(module)
    if not native_bfloat16:
        annotated = map_kernels(annotated, _unfused_if_bfloat16)
    annotated = map_kernels(annotated, _elementwise_if_moves)
    passes = [
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
    current = tvm.transform.PassContext.current()
    limit = {**current.config, "relax.FuseOps.max_depth": MAX_FUSED}
    with tvm.transform.PassContext(opt_level=current.opt_level, config=limit):
        fused = tvm.transform.Sequential(passes)(annotated)
    return map_kernels(fused, lambda function: _marked(take_shifts_out(function)))


def _unfused_if_bfloat16(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A tensor program that is left alone by TVM's fusion if it stores bfloat16."""
    stored: set[str] = set()

    def see(store: tirx.BufferStore) -> None:
        stored.add(str(store.buffer.dtype))

    tvm_ffi.structural_walk(function.body, [(tirx.BufferStore, see)], order="post")
    return function.with_attr("op_pattern", _OPAQUE) if "bfloat16" in stored else function


def _elementwise_if_moves(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A tensor program that is fused with the kernel before it if it has the attribute."""
    return function.with_attr("op_pattern", _ELEMENTWISE) if _has(function, MOVES) else function


def _marked(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel that says so if it is a reshape alone.

    Its block's name does, as long as nothing is inlined into that.
    """
    names: list[str] = []
    rule = (s_tir.SBlock, lambda found: names.append(found.name_hint))
    tvm_ffi.structural_walk(function.body, [rule], order="post")
    is_reshape = [name for name in names if name != "root"] == [_RESHAPE_BLOCK]
    return function.with_attr(RESHAPE, 1) if is_reshape else function


def _has(function: Any, attribute: str) -> bool:
    return function.attrs is not None and attribute in function.attrs


def finalize(module: tvm.IRModule, *planned: tvm.transform.Pass) -> tvm.IRModule:
    """Plan memory and lower the graph to calls of the virtual machine.

    Args:
        module: Scheduled kernels and the graph that calls them.
        planned: Passes to run once memory is planned and before it is allocated.
    """
    module = _reshapes_as_views(module)
    passes = [
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
        *planned,
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]
    return tvm.transform.Sequential(passes)(module)


def _reshapes_as_views(module: tvm.IRModule) -> tvm.IRModule:
    """The module in which reshapes that are kernels of their own compute nothing.

    TVM finds out by index arithmetic whether a kernel moves nothing, which sizes known only at run
    time may be too much for.
    """
    reshapes = {v for v, function in module.functions.items() if _has(function, RESHAPE)}
    if not reshapes:
        return module

    def is_view(binding: Any) -> bool:
        value: Any = getattr(binding, "value", None)
        # What a function returns must not share memory with what it was given.
        if not (isinstance(binding.var, relax.DataflowVar) and isinstance(value, relax.Call)):
            return False
        return getattr(value.op, "name", "") == "relax.call_tir" and value.args[0] in reshapes

    def block(old: Any) -> Any:
        return type(old)([_as_view(b) if is_view(b) else b for b in old.bindings])

    return rewrite_main(relax.BlockBuilder(module), module, block)


def _as_view(binding: Any) -> Any:
    data = binding.value.args[1].fields[0]  # sizes follow
    return relax.VarBinding(binding.var, relax.op.reshape(data, binding.var.ty.shape))


def build_executable(module: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """Code for a finalized module, with nothing of TVM's own pipeline in between.

    Kernels for devices stay source, as on a machine without the device: where TVM finds one, it
    would compile them for that one, in this process.
    """
    with target, _kernels_as_source():
        return relax.build(module, target, relax_pipeline=_unchanged)


def export_library(
    executable: relax.VMExecutable, link: Link, objects: Sequence[bytes] = (), **options: Any
) -> bytes:
    """The bytes of a shared library.

    Args:
        executable: What it holds.
        link: Links objects, as TVM's ``export_library`` wants.
        objects: Object files that it holds, too.
        options: More for TVM.
    """
    with tempfile.TemporaryDirectory(prefix="hybridc-") as folder:
        files = [Path(folder) / f"kernel{position}.o" for position in range(len(objects))]
        for file, data in zip(files, objects, strict=True):
            file.write_bytes(data)
        path = Path(folder) / "part.so"
        options = {"addons": list(map(str, files)), "workspace_dir": folder, **options}
        executable.export_library(str(path), fcompile=link, **options)
        return path.read_bytes()


@contextmanager
def _kernels_as_source() -> Iterator[None]:
    """Sets the environment variable that TVM asks; the compiler's threads all want it set."""
    before = os.environ.get(_AS_SOURCE)
    os.environ[_AS_SOURCE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_AS_SOURCE, None)
        else:
            os.environ[_AS_SOURCE] = before


@tvm.transform.module_pass(opt_level=0, name="Unchanged")  # type: ignore[untyped-decorator]
def _unchanged(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    return module
