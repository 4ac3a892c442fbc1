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


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("constants", [[], [1, 2]])
@pytest.mark.parametrize(("ratio", "symbolic"), [(0.25, {}), (0.75, {0: {0: "n"}})])
def test_dropout_in_training(dtype, constants, ratio, symbolic):
    data = np.linspace(1, 2, COUNT).reshape(100, -1).astype(dtype)
    inputs = [data, np.array(ratio, np.float32), np.array(True)]
    case = Case("Dropout", inputs, {"seed": 3}, 13, constants, 2, symbolic)
    given = [x for i, x in enumerate(inputs) if i not in constants]
    result, mask = run_lowered(lower_model(make_model(case)), given)
    assert result.dtype == dtype
    assert mask.dtype == bool
    assert_moments(mask, 1 - ratio, np.sqrt(ratio * (1 - ratio)))
    np.testing.assert_allclose(result[mask], data[mask] / (1 - ratio), rtol=2e-3)
    assert not result[~mask].any()


@pytest.mark.parametrize("constants", [[], [1], [2], [1, 2]])
@pytest.mark.parametrize(("ratio", "training"), [(0.0, True), (0.5, False)])
@pytest.mark.parametrize("outputs", [1, 2])
def test_dropout_that_drops_nothing(constants, ratio, training, outputs):
    inputs = [np.ones((3, 4), np.float32), np.array(ratio, np.float32), np.array(training)]
    case = Case("Dropout", inputs, {}, 13, constants, outputs)
    given = [x for i, x in enumerate(inputs) if i not in constants]
    result, *mask = run_lowered(lower_model(make_model(case)), given)
    np.testing.assert_array_equal(result, inputs[0])
    assert all(m.dtype == bool and m.all() for m in mask)
