"""Tensors that are reshaped, transposed and reshaped again are read in vectors."""

from __future__ import annotations

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")

from hybridc.targets.llvm.cpu import parse_cpu  # noqa: E402
from hybridc.targets.llvm.schedules import schedule_function  # noqa: E402
from hybridc.targets.llvm.schedules.blocks import collect  # noqa: E402
from tvm import te, tirx, topi  # noqa: E402


@pytest.mark.parametrize(("size", "channels", "block"), [(10, 24, 2), (6, 8, 3), (5, 7, 2)])
def test_channels_laid_out_as_pixels(size, channels, block):
    """DepthToSpace of images with the channels last moves runs of channels."""
    cpu = parse_cpu("host")
    data = te.placeholder((1, size, size, block * block * channels), "uint8", "data")
    split = topi.reshape(data, (size, size, block, block, channels))
    moved = topi.transpose(split, (0, 2, 1, 3, 4))
    result = topi.reshape(moved, (1, size * block, size * block, channels)).astype("int16")
    wide = te.compute(result.shape, lambda *i: result(*i) - tirx.const(3, "int16"), name="wide")
    function = schedule_function(te.create_prim_func([data, wide]), cpu)
    assert len(collect(function.body, tirx.BufferStore)) == 1
    (load,) = collect(function.body, tvm.ir.TensorLoad)
    divided = collect(load.indices[-1], tirx.FloorDiv)
    assert not divided
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    built = tvm.compile(module, target=cpu.target)
    x = np.random.default_rng(1).integers(0, 256, tuple(map(int, data.shape))).astype(np.uint8)
    y = tvm.runtime.tensor(np.zeros(tuple(map(int, wide.shape)), np.int16))
    built["main"](tvm.runtime.tensor(x), y)
    pixels = x.reshape(size, size, block, block, channels).transpose(0, 2, 1, 3, 4)
    np.testing.assert_array_equal(y.numpy(), pixels.reshape(y.shape).astype(np.int16) - 3)
