"""What all targets that TVM compiles for do with a Relax module around their schedules."""

from __future__ import annotations

import tvm
from tvm import relax


def fuse(module: tvm.IRModule) -> tvm.IRModule:
    """Fuse tensor programs into kernels."""
    passes = [
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
    return tvm.transform.Sequential(passes)(module)


def finalize(module: tvm.IRModule, *planned: tvm.transform.Pass) -> tvm.IRModule:
    """Plan memory and lower the graph to calls of the virtual machine.

    Args:
        module: Scheduled kernels and the graph that calls them.
        planned: Passes to run once memory is planned and before it is allocated.
    """
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


def build_executable(module: tvm.IRModule, target: tvm.target.Target) -> relax.VMExecutable:
    """Code for a finalized module, with nothing of TVM's own pipeline in between."""
    with target:
        return relax.build(module, target, relax_pipeline=_unchanged)


@tvm.transform.module_pass(opt_level=0, name="Unchanged")  # type: ignore[untyped-decorator]
def _unchanged(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    return module
