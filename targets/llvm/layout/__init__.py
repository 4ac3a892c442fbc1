"""The layout pass: which tensors of a module are blocked, and the module rewritten so.

Convolutions are fastest with blocked outputs (``layout/kernels.py``); kernels that treat channels
alike take either layout; everything else wants plain tensors. Which tensors are blocked is chosen
for the whole module at once, by a minimum cut over estimated costs. Weights are packed here, at
compile time.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from hybridc.targets.llvm.cpu import Cpu
from hybridc.targets.llvm.layout.choose import choose_blocked
from hybridc.targets.llvm.layout.graph import read_graph
from hybridc.targets.llvm.layout.rewrite import rewrite

from hybridc.bundle.tensors import Array


def block_layouts(
    module: tvm.IRModule, weights: Mapping[str, Array], cpu: Cpu
) -> tuple[tvm.IRModule, Mapping[str, Array]]:
    """Choose layouts, and rewrite a module and its weights accordingly.

    Args:
        module: A legalized Relax module whose ``main`` takes the weights as one tuple, last.
        weights: Their arrays by name, in order.
        cpu: The processor.

    Returns:
        The module with blocked tensors inside; inputs and outputs of ``main`` stay plain, but for
        the weights, which are returned in their new order.
    """
    graph = read_graph(module, weights, cpu)
    # Estimates are compared with estimates: a tuning changes how kernels are computed, not which.
    chosen = choose_blocked(graph, cpu.untuned)
    return rewrite(graph, chosen, cpu) if chosen else (module, weights)
