"""What is done to a graph before its kernels go to tensor cores: values stay, copies go."""

from __future__ import annotations

import numpy as np
from hybridc.targets import relax_pipeline
from hybridc.targets.cuda.channels import channels_last
from hybridc.targets.cuda.matrices import depth_innermost
from hybridc.targets.cuda.permuted import products_in_place
from hybridc.targets.gpu.normalize import rows_normalized
from hybridc.targets.gpu.pipeline import legalize

from tests.gpu.emulation import lowered_model, run_serially
from tests.models import make_model, node, random, run_reference

TYPES = frozenset({"float32"})


def kernels(module):
    legal = legalize(rows_normalized(products_in_place(module, {}, TYPES)))
    return relax_pipeline.fuse(channels_last(legal, TYPES))


def same(model, feeds):
    found, expected = run_serially(model, feeds, kernels=kernels), run_reference(model, feeds)
    for name, values in expected.items():
        assert np.abs(found[name] - values).max() < 1e-5 * np.abs(values).max()


def images():
    """Convolutions, depthwise ones too, with pooling, a residual, a concatenation and a mean."""
    nodes = [
        node("Conv", "x w1", "c1", pads=[1] * 4),
        node("MaxPool", "c1", "p", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        node("Conv", "p w2", "c2"),
        node("Conv", "c2 w3", "c3", pads=[1] * 4, group=16),
        node("Conv", "c3 w4", "c4"),
        node("Add", "c4 p", "s"),
        node("Concat", "s c3", "cc", axis=1),
        node("GlobalAveragePool", "cc", "g"),
        node("Flatten", "g", "y"),
    ]
    shapes = {"w1": (24, 8, 3, 3), "w2": (16, 24, 1, 1), "w3": (16, 1, 3, 3), "w4": (24, 16, 1, 1)}
    weights = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return make_model(nodes, {"x": (2, 8, 9, 9)}, {"y": (2, 40)}, weights)


def attention():
    """Attention of four heads, normalized."""
    nodes = []
    weights = {name: random(32, 32, seed=i) * 0.2 for i, name in enumerate("qkv")}
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            node("MatMul", f"x {name}", f"{name}p"),
            node("Reshape", f"{name}p heads", f"{name}h"),
            node("Transpose", f"{name}h", f"{name}t", perm=order),
        ]
    nodes += [
        node("MatMul", "qt kt", "scores"),
        node("Softmax", "scores", "shares", axis=-1),
        node("MatMul", "shares vt", "c"),
        node("Transpose", "c", "ct", perm=[0, 2, 1, 3]),
        node("Reshape", "ct rows", "r"),
        node("LayerNormalization", "r scale shift", "y", axis=-1),
    ]
    weights |= {"heads": np.array([2, 12, 4, 8]), "rows": np.array([2, 12, 32])}
    weights |= {"scale": random(32, seed=5), "shift": random(32, seed=6)}
    return make_model(nodes, {"x": (2, 12, 32)}, {"y": (2, 12, 32)}, weights)


def test_images_keep_their_values_with_channels_innermost():
    same(images(), {"x": random(2, 8, 9, 9)})


def test_tensors_between_convolutions_have_channels_innermost():
    lowered, *_ = lowered_model(images())
    text = str(channels_last(legalize(lowered.module), TYPES)["main"])
    for shape in ("2, 9, 9, 24", "2, 5, 5, 24", "2, 5, 5, 16", "2, 5, 5, 40"):
        assert f"R.Tensor(({shape})" in text
    assert "input_0: R.Tensor((2, 8, 9, 9)" in text


def test_exact_convolutions_keep_their_layout():
    lowered, *_ = lowered_model(images())
    legal = legalize(lowered.module)
    assert channels_last(legal, frozenset({"float16"})) is legal


def test_images_without_convolutions_keep_their_layout():
    nodes = [node("Relu", "x", "r"), node("Softmax", "r", "y", axis=1)]
    shape = (2, 16, 4, 4)
    lowered, *_ = lowered_model(make_model(nodes, {"x": shape}, {"y": shape}))
    legal = legalize(lowered.module)
    assert channels_last(legal, TYPES) is legal


def test_attention_keeps_its_values():
    same(attention(), {"x": random(2, 12, 32)})


def test_attention_copies_nothing_to_swap_axes():
    lowered, *_ = lowered_model(attention())
    assert "permute_dims" in str(lowered.module["main"])
    assert "permute_dims" not in str(products_in_place(lowered.module, {}, TYPES)["main"])


def test_swapped_results_that_others_read_stay():
    nodes = [
        node("MatMul", "x w", "p"),
        node("Transpose", "p", "t", perm=[0, 2, 1]),
        node("Relu", "p", "y"),
        node("Relu", "t", "z"),
    ]
    sizes = {"x": (2, 8, 16), "w": (2, 16, 24)}
    model = make_model(nodes, sizes, {"y": (2, 8, 24), "z": (2, 24, 8)})
    same(model, {name: random(*shape) for name, shape in sizes.items()})


def test_normalization_is_one_kernel():
    nodes = [node("LayerNormalization", "x scale shift", "y", axis=-1, epsilon=0.5)]
    weights = {"scale": random(24, seed=1), "shift": random(24, seed=2)}
    model = make_model(nodes, {"x": (3, 5, 24)}, {"y": (3, 5, 24)}, weights)
    same(model, {"x": random(3, 5, 24)})
    lowered, *_ = lowered_model(model)
    assert str(kernels(lowered.module)["main"]).count("R.call_tir") == 1


def test_matrices_are_transposed():
    nodes = [node("MatMul", "x w", "p"), node("Relu", "p", "y")]
    matrix = random(16, 24)
    model = make_model(nodes, {"x": (12, 16)}, {"y": (12, 24)}, {"w": matrix})
    lowered, *_ = lowered_model(model)
    module, weights = depth_innermost(lowered.module, lowered.weights, TYPES)
    (transposed,) = weights.values()
    assert np.array_equal(transposed, matrix.T)
    assert "R.matmul" not in str(module["main"])
