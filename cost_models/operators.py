"""Classes of operators: what a device does equally well, as far as a model of time can tell.

A peak on a data sheet is reached by dense products only. So each class has an efficiency of its
own, which is a guess for a data sheet and fitted where there are measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

CONVOLUTION = "convolution"
DEPTHWISE = "depthwise convolution"
PRODUCT = "matrix product"
RECURRENT = "recurrent"
REDUCTION = "reduction"
ELEMENTWISE = "element-wise"
MOVEMENT = "movement"
VIEW = "view"
OTHER = "other"

CLASSES = (
    CONVOLUTION,
    DEPTHWISE,
    PRODUCT,
    RECURRENT,
    REDUCTION,
    ELEMENTWISE,
    MOVEMENT,
    VIEW,
    OTHER,
)

_MEMBERS = {
    PRODUCT: "Attention Einsum FusedMatMul Gemm MatMul MatMulInteger QLinearMatMul",
    RECURRENT: "DynamicQuantizeLSTM GRU LSTM RNN",
    REDUCTION: """ArgMax ArgMin AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool
        GroupNormalization InstanceNormalization LayerNormalization LogSoftmax LpNormalization
        LpPool MaxPool ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
        ReduceMin ReduceProd ReduceSum ReduceSumSquare RMSNormalization Softmax""",
    ELEMENTWISE: """Abs Acos Acosh Add And Asin Asinh Atan Atanh BatchNormalization BitShift
        BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu Clip Cos Cosh DequantizeLinear Div
        Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN
        LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow QuantizeLinear
        Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Tan
        Tanh ThresholdedRelu Where Xor""",
    MOVEMENT: """Concat DepthToSpace Expand Gather GatherElements GatherND Pad Resize
        ReverseSequence ScatterElements ScatterND Slice SpaceToDepth Split Tile Transpose Trilu""",
    VIEW: "Constant Dropout Flatten Identity Reshape Shape Size Squeeze Unsqueeze",
}
_CLASS_OF = {name: kind for kind, names in _MEMBERS.items() for name in names.split()}
_CONVOLUTIONS = frozenset({"Conv", "ConvInteger", "ConvTranspose", "FusedConv", "QLinearConv"})


def operator_class(node: ir.Node) -> str:
    """The class of a node's operator."""
    if node.op_type in _CONVOLUTIONS:
        return DEPTHWISE if _is_depthwise(node) else CONVOLUTION
    return _CLASS_OF.get(node.op_type, OTHER)


def _is_depthwise(node: ir.Node) -> bool:
    """Whether each filter sees one channel, so that nothing that was read is used twice."""
    groups = node.attributes.get_int("group", 1)
    shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
    return groups > 1 and shape is not None and len(shape) > 1 and shape[1] == groups
