"""From a lowered module to fused kernels, and from scheduled kernels to calls of the machine."""

from __future__ import annotations

import tvm
from hybridc.targets.gpu.legalize import LEGALIZATIONS
from tvm import relax


def fuse(module: tvm.IRModule) -> tvm.IRModule:
    """Legalize operators to tensor programs and fuse them into kernels."""
    passes = [
        relax.transform.DecomposeOpsForInference(),
        relax.transform.LegalizeOps(LEGALIZATIONS),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
    return tvm.transform.Sequential(passes)(module)


def finalize(module: tvm.IRModule) -> tvm.IRModule:
    """Plan memory and lower the graph to calls of the virtual machine."""
    passes = [
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]
    return tvm.transform.Sequential(passes)(module)
