"""The order of the passes, and the check that follows each one of a third party."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
from hybridc.passes.clean_movement import CleanMovement
from hybridc.passes.close_interface import CloseInterface
from hybridc.passes.drop_stale_shapes import DropStaleShapes
from hybridc.passes.expand_functions import ExpandFunctions, Lowers
from hybridc.passes.expand_gradient import ExpandGradient
from hybridc.passes.fold_affine import FoldAffine
from hybridc.passes.fold_affine_before import FoldAffineBefore
from hybridc.passes.fold_constants import FoldConstants
from hybridc.passes.fold_pads import FoldPads
from hybridc.passes.fuse_gemm import FuseGemm
from hybridc.passes.infer_shapes import InferShapes
from hybridc.passes.inline_functions import InlineFunctions
from hybridc.passes.move_shuffles import MoveShuffles
from hybridc.passes.move_transposes import MoveTransposes
from hybridc.passes.name_nodes import NameNodes
from hybridc.passes.quantization.channels_last import ChannelsLast
from hybridc.passes.quantization.fuse_regions import FuseQuantizedRegions
from hybridc.passes.quantization.split_dequantized import SplitDequantized
from hybridc.passes.recognize_activations import RecognizeActivations
from hybridc.passes.recognize_attention import RecognizeAttention
from hybridc.passes.recognize_normalizations import RecognizeNormalizations
from hybridc.passes.recognize_softmax import RecognizeSoftmax
from hybridc.passes.share_subexpressions import ShareSubexpressions
from hybridc.passes.simplify import Simplify
from hybridc.passes.split_transposed_convolutions import SplitTransposedConvolutions
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
)


@dataclass(frozen=True)
class Step:
    """One pass of the pipeline.

    Attributes:
        name: What it does, for progress lines and reports.
        make: Makes the pass.
        optional: Whether the model compiles without it, so that its failure is only reported.
    """

    name: str
    make: Callable[[], ir.passes.PassBase]
    optional: bool = False


def make_steps(lowers: Lowers, isolate: bool = False) -> tuple[Step, ...]:
    """The passes in order.

    Args:
        lowers: Whether an operator has a converter; those that have none are expanded.
        isolate: Whether to run native code of others in child processes.
    """
    return (
        Step("drop stale shapes", DropStaleShapes),
        Step("name nodes", NameNodes),
        Step("inline functions", InlineFunctions),
        Step("close the interface", CloseInterface),
        Step("infer types", InferShapes, optional=True),
        Step("expand gradients", ExpandGradient, optional=True),
        Step("expand functions", lambda: ExpandFunctions(lowers), optional=True),
        Step("lift constants of functions", lambda: LiftConstantsToInitializersPass(True, 0)),
        Step("fuse quantized regions", FuseQuantizedRegions, optional=True),
        Step("simplify", lambda: Simplify(isolate), optional=True),
        Step("drop shapes of simplified", DropStaleShapes),
        Step("name new nodes", NameNodes),
        Step("lift constants", lambda: LiftConstantsToInitializersPass(True, 0)),
        Step("infer shapes", InferShapes, optional=True),
        Step("fold constants", FoldConstants),
        Step("infer shapes of folded", InferShapes, optional=True),
        Step("fold shapes", FoldConstants),
        *optimizations(),
        Step("remove unused nodes", RemoveUnusedNodesPass),
        Step("name fused nodes", NameNodes),
        Step("infer shapes of fused", InferShapes, optional=True),
    )


def optimizations() -> tuple[Step, ...]:
    """What makes the model faster; it compiles without any of them."""
    steps: tuple[tuple[str, Callable[[], ir.passes.PassBase]], ...] = (
        ("clean up movement", CleanMovement),
        ("share subexpressions", ShareSubexpressions),
        ("fold scales and shifts", FoldAffine),
        ("recognize activations", RecognizeActivations),
        ("recognize normalizations", RecognizeNormalizations),
        ("recognize softmax", RecognizeSoftmax),
        ("recognize attention", RecognizeAttention),
        ("put channels last", ChannelsLast),
        ("move transposes", MoveTransposes),
        ("clean up moved", CleanMovement),
        ("fold pads", FoldPads),
        ("fuse matrix products", FuseGemm),
        ("fold scales and shifts in front", FoldAffineBefore),
        ("fold scales and shifts behind", FoldAffine),
        ("split transposed convolutions", SplitTransposedConvolutions),
        ("move shuffles", MoveShuffles),
        ("share what became equal", ShareSubexpressions),
        ("split what is dequantized", SplitDequantized),
    )
    return tuple(Step(name, make, optional=True) for name, make in steps)


def run_passes(
    model: ir.Model, lowers: Lowers, isolate: bool = False
) -> tuple[ir.Model, list[str]]:
    """Run all passes; see :func:`make_steps` for the arguments.

    Returns:
        The resulting model, and a line for each optional step that failed and was left out.
    """
    notes: list[str] = []
    backup: ir.Model | None = None  # of the model as it is, where there is one
    for step in make_steps(lowers, isolate):
        if step.optional and backup is None:
            backup = model.clone()
        try:
            result = step.make()(model)
        except Exception as error:  # a third party's step may fail in any way
            if not step.optional or backup is None:
                raise
            model, backup = backup, None
            notes.append(f"step '{step.name}' was left out: {_first_line(error)}")
            continue
        model = result.model
        if result.modified:
            backup = None
    return model, notes


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__
