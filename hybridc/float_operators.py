"""Operators that compute with floats of any size, and those that only move elements.

Where a device computes with 32 bits, the first keep their results in float32 whatever 16-bit type
the model gives them (:mod:`hybridc.lowering.widening`); where a model is turned into one of 16
bits, they get that type (:mod:`hybridc.precision.half`).
"""

from __future__ import annotations

COMPUTED = frozenset(
    """Abs Acos Acosh Add Asin Asinh Atan Atanh Attention AveragePool BatchNormalization Celu Clip
    Conv ConvTranspose Cos Cosh CumSum DeformConv Div Einsum Elu Erf Exp GRU Gelu Gemm
    GlobalAveragePool GlobalLpPool GlobalMaxPool GridSample GroupNormalization HardSigmoid
    HardSwish InstanceNormalization LRN LSTM LayerNormalization LeakyRelu Log LogSoftmax
    LpNormalization LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mul Neg
    PRelu Pow RMSNormalization RNN Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Resize RoiAlign
    RotaryEmbedding Selu Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt Sub Sum Swish Tan Tanh
    Upsample""".split()
)
"""Operators of the default domain that compute."""

MICROSOFT = frozenset(
    """Attention BiasGelu BiasSplitGelu EmbedLayerNormalization FastGelu FusedConv FusedGemm
    FusedMatMul Gelu GroupQueryAttention MultiHeadAttention QuickGelu RotaryEmbedding
    SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization""".split()
)
"""The same of the domain ``com.microsoft``."""

MOVED = frozenset(
    """Compress Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad
    Reshape ReverseSequence Slice SpaceToDepth Split Squeeze Tile Transpose Trilu Unsqueeze
    Where""".split()
)
"""Operators that only move elements."""
