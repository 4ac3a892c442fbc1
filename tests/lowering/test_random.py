"""Random numbers: shapes, types, and moments within six standard errors."""

import numpy as np
import pytest
import tvm
from harness import TARGET, Case, lower_model, make_model, run_lowered
from tvm import relax, te, tirx

from hybridc.lowering.ops.random import Stream

COUNT = 40_000


def draw(op, inputs=(), **attributes):
    """Outcome of one node."""
    case = Case(op, list(inputs), attributes, opset=22)
    return run_lowered(lower_model(make_model(case)), list(inputs))[0]


def assert_moments(numbers, mean, deviation):
    numbers = numbers.astype(np.float64).ravel()
    error = deviation / np.sqrt(numbers.size)
    assert abs(numbers.mean() - mean) < 6 * error
    assert abs(numbers.std() - deviation) < 0.05 * deviation
    neighbors = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbors) < 6 / np.sqrt(numbers.size)


@pytest.mark.parametrize(("dtype", "name"), [(1, "float32"), (11, "float64"), (10, "float16")])
def test_uniform(dtype, name):
    numbers = draw("RandomUniform", shape=[4, COUNT // 4], low=-1.0, high=3.0, dtype=dtype)
    assert numbers.dtype == name
    assert numbers.shape == (4, COUNT // 4)
    assert numbers.min() >= -1
    assert numbers.max() <= 3
    assert_moments(numbers, 1.0, 4 / np.sqrt(12))


@pytest.mark.parametrize(("dtype", "name"), [(1, "float32"), (11, "float64")])
def test_normal(dtype, name):
    numbers = draw("RandomNormal", shape=[COUNT], mean=2.0, scale=0.5, dtype=dtype)
    assert numbers.dtype == name
    assert np.isfinite(numbers).all()
    assert_moments(numbers, 2.0, 0.5)
    assert 0.667 < (np.abs(numbers - 2) < 0.5).mean() < 0.698


@pytest.mark.parametrize("op", ["RandomNormalLike", "RandomUniformLike"])
def test_like(op):
    source = np.zeros((2, 3), np.float64)
    assert draw(op, [source]).dtype == np.float64
    numbers = draw(op, [source], dtype=1)
    assert numbers.dtype == np.float32
    assert numbers.shape == (2, 3)
    assert np.unique(numbers).size == 6


def test_the_generator_is_the_published_one():
    """SplitMix64 computed with Python's integers."""
    key, mask = 0x3FFB_1234_5678_9ABC, 2**64 - 1

    def splitmix(position):
        number = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
        number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & mask
        number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
        return number ^ (number >> 31)

    def kernel():
        count = tirx.const(1000, "int64")
        return te.compute((count,), lambda i: Stream(key).bits(i, 64), "bits")

    builder = relax.BlockBuilder()
    with builder.function("main"):
        builder.emit_func_output(builder.emit_te(kernel), [])
    executable = relax.build(builder.finalize(), tvm.target.Target(TARGET))
    numbers = relax.VirtualMachine(executable, tvm.cpu())["main"]().numpy()
    assert numbers.tolist() == [splitmix(position) for position in range(1000)]


def test_seeds_choose_the_numbers():
    first, again, other = (draw("RandomUniform", shape=[8], seed=s) for s in (1.0, 1.0, 2.0))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_bernoulli():
    chances = np.repeat(np.array([0.0, 0.3, 1.0], np.float32), COUNT).reshape(3, COUNT)
    numbers = draw("Bernoulli", [chances], dtype=7)
    assert numbers.dtype == np.int64
    assert not numbers[0].any()
    assert numbers[2].all()
    assert_moments(numbers[1], 0.3, np.sqrt(0.21))


def test_multinomial():
    chances = np.array([[0.5, 0.3, 0.2], [0.0, 0.1, 0.9]])
    with np.errstate(divide="ignore"):
        scores = np.log(chances).astype(np.float32) + 3
    drawn = draw("Multinomial", [scores], sample_size=COUNT)
    assert drawn.dtype == np.int32
    assert drawn.shape == (2, COUNT)
    for row, wanted in zip(drawn, chances, strict=True):
        shares = np.bincount(row, minlength=3) / COUNT
        np.testing.assert_allclose(shares, wanted, atol=6 * 0.5 / np.sqrt(COUNT))
