"""From a lowered module to fused kernels."""

from __future__ import annotations

import tvm
from hybridc.targets import relax_pipeline
from hybridc.targets.gpu.legalize import LEGALIZATIONS
from tvm import relax


def fuse(module: tvm.IRModule) -> tvm.IRModule:
    """Legalize operators to tensor programs and fuse them into kernels."""
    return relax_pipeline.fuse(legalize(module))


def legalize(module: tvm.IRModule) -> tvm.IRModule:
    """Legalize operators to tensor programs."""
    passes = [
        relax.transform.DecomposeOpsForInference(),
        relax.transform.LegalizeOps(LEGALIZATIONS),
    ]
    return tvm.transform.Sequential(passes)(module)
