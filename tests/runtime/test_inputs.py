"""What a caller hands in: every array that numpy can make, and every mistake."""

import ctypes

import numpy as np
import pytest

import hybridc
from hybridc.errors import UsageError
from tests.models import branched_model, make_model, node, random, run_reference, scale_model
from tests.support import assert_close, compile_to

SHAPE = (1, 3, 8, 8)
VALUES = random(*SHAPE)


@pytest.fixture(scope="module")
def model(bundle):
    with hybridc.load(bundle) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected():
    return run_reference(branched_model(), {"x": VALUES})


class Foreign:
    """A tensor of another library: nothing but the DLPack protocol."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Capsule(Foreign):
    """The same from before ``__dlpack__`` had options."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class OnGpu(Foreign):
    """Claims to be in the memory of a CUDA device."""

    def __dlpack__(self, **_options):
        capsule = self.array.__dlpack__()
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = (
            ctypes.c_void_p,
            [ctypes.py_object, ctypes.c_char_p],
        )
        tensor = get_pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(tensor + ctypes.sizeof(ctypes.c_void_p)).value = 2
        return capsule

    def __dlpack_device__(self):
        return (2, 0)


def shifted(array, count):
    """A copy whose data starts ``count`` bytes after an aligned address."""
    memory = np.zeros(array.nbytes + 64 + count, np.uint8)
    start = -memory.ctypes.data % 64 + count
    view = np.ndarray(array.shape, array.dtype, memory.data, start)
    view[...] = array
    assert view.ctypes.data % 64 == count
    return view


def read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


LAYOUTS = {
    "plain": VALUES.copy(),
    "read-only": read_only(VALUES),
    "Fortran order": np.asfortranarray(VALUES),
    "strided": np.repeat(VALUES, 2, axis=3)[..., ::2],
    "reversed": VALUES[..., ::-1].copy()[..., ::-1],
    "4 bytes off": shifted(VALUES, 4),
    "1 byte off": shifted(VALUES, 1),
    "read-only, 4 bytes off": read_only(shifted(VALUES, 4)),
    "from bytes": np.frombuffer(VALUES.tobytes(), np.float32).reshape(SHAPE),
    "subclass": VALUES.copy().view(np.recarray),
    "DLPack": Foreign(VALUES.copy()),
    "DLPack without options": Capsule(VALUES.copy()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(model, expected, layout):
    assert_close(model(x=LAYOUTS[layout]), expected)


def test_broadcast_array(model):
    wide = np.broadcast_to(np.float32(0.5), SHAPE)
    assert_close(model(x=wide), run_reference(branched_model(), {"x": wide.copy()}))


def test_inputs_are_left_alone(model):
    array = VALUES.copy()
    model(x=array)
    np.testing.assert_array_equal(array, VALUES)


def test_results_are_the_callers(model, expected):
    """No later call and no closing changes what was returned."""
    first = model(x=VALUES)
    second = model(x=VALUES + 1)
    assert not np.shares_memory(first["y"], second["y"])
    assert_close(first, expected)


def test_results_outlive_the_model(bundle, expected):
    with hybridc.load(bundle) as loaded:
        result = loaded(x=VALUES)
    assert_close(result, expected)


@pytest.mark.parametrize(
    ("operator", "attributes"), [("Identity", {}), ("Reshape", {}), ("Flatten", {"axis": 0})]
)
def test_results_share_no_memory_with_inputs(tmp_path, operator, attributes):
    shape = {"shape": np.array([1, 6])} if operator == "Reshape" else {}
    inputs = "x shape" if shape else "x"
    dims = (2, 3) if operator == "Identity" else (1, 6)
    nodes = [node(operator, inputs, "y", "only", **attributes)]
    compile_to(tmp_path / "b.hyb", make_model(nodes, {"x": (2, 3)}, {"y": dims}, shape))
    array = random(2, 3)
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        result = loaded(x=array)["y"]
    assert not np.shares_memory(result, array)
    np.testing.assert_array_equal(result.ravel(), array.ravel())


def test_results_share_no_memory_with_each_other(tmp_path):
    nodes = [node("Relu", "x", "y", "relu"), node("Flatten", "y", "z", "flatten", axis=0)]
    outputs = {"y": (2, 3), "z": (1, 6)}
    compile_to(tmp_path / "b.hyb", make_model(nodes, {"x": (2, 3)}, outputs))
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        result = loaded(x=random(2, 3))
    assert not np.shares_memory(result["y"], result["z"])


def test_results_share_no_memory_with_weights(tmp_path):
    """A caller that overwrites a result changes no later call."""
    weights = {"w": random(64, 64)}
    nodes = [node("Relu", "x", "y", "relu")]
    model = make_model(nodes, {"x": (2,)}, {"y": (2,), "w": (64, 64)}, weights)
    compile_to(tmp_path / "b.hyb", model)
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        first = loaded(x=random(2))["w"]
        np.testing.assert_array_equal(first, weights["w"])
        if first.flags.writeable:
            first[...] = 0
        np.testing.assert_array_equal(loaded(x=random(2))["w"], weights["w"])


@pytest.mark.parametrize("dims", [(), (0,), (0, 3), (3, 0, 2), (1,)])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_scalars_and_nothing(tmp_path, dims, dtype):
    nodes = [node("Add", "x x", "y", "add")]
    model = make_model(nodes, {"x": dims}, {"y": dims}, dtype=dtype)
    # a dimension of 0 in a model file means that it is not known: it has to be asked for
    shapes = (f"x={'x'.join(map(str, dims))}",) if dims else ()
    compile_to(tmp_path / "b.hyb", model, shapes=shapes, verify=True)
    array = np.full(dims, 3, dtype)
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        result = loaded(x=array)["y"]
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, array + array)


@pytest.mark.parametrize(
    "dtype", "int8 uint8 int16 int32 int64 float16 float32 float64 uint32 uint64".split()
)
def test_element_types(tmp_path, dtype):
    compile_to(tmp_path / "b.hyb", scale_model((5,), dtype))
    array = np.arange(5).astype(dtype)
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        result = loaded(x=array)["y"]
        with pytest.raises(UsageError, match="must be x"):
            loaded(x=np.zeros(5, "float32" if dtype == "float64" else "float64"))
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, 2 * array)


EXPECTED = "x: float32[1x3x8x8]"


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, ["input 'x' is missing", EXPECTED]),
        ({"X": VALUES}, ["input 'x' is missing and there is no input 'X'"]),
        ({"x": VALUES, "xx": VALUES}, ["no input 'xx' (did you mean 'x'?)", EXPECTED]),
        ({"x": VALUES, "other": VALUES}, ["there is no input 'other'"]),
        ({"x": VALUES, 1: VALUES}, ["there is no input 1"]),
        ({"x": VALUES.astype("float64")}, ["float64[1x3x8x8]", EXPECTED]),
        ({"x": VALUES.astype(">f4")}, [">f4", EXPECTED]),
        ({"x": VALUES.astype(object)}, ["object", EXPECTED]),
        ({"x": VALUES.astype(str)}, ["<U", EXPECTED]),
        ({"x": VALUES[0]}, ["float32[3x8x8]", EXPECTED]),
        ({"x": VALUES[:, :2]}, ["float32[1x2x8x8]", EXPECTED]),
        ({"x": VALUES[:0]}, ["float32[0x3x8x8]", EXPECTED]),
        ({"x": np.float32(1)}, ["float32", "numpy array"]),
        ({"x": VALUES.tolist()}, ["is a list and must be a numpy array"]),
        ({"x": None}, ["is a NoneType"]),
        ({"x": "text"}, ["is a str"]),
        ({"x": Foreign(VALUES.astype("float64"))}, ["float64[1x3x8x8]", EXPECTED]),
        ({"x": Foreign(VALUES[0])}, ["float32[3x8x8]", EXPECTED]),
        ({"x": Foreign(np.asfortranarray(VALUES))}, ["'x'", "DLPack", "contiguous"]),
        ({"x": OnGpu(VALUES.copy())}, ["'x'", "host memory"]),
    ],
)
def test_mistakes(model, arrays, words):
    with pytest.raises(UsageError) as caught:
        model.run(arrays)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_names_that_python_uses_itself(tmp_path):
    nodes = [node("Add", "self file", "y", "add")]
    compile_to(tmp_path / "b.hyb", make_model(nodes, {"self": (2,), "file": (2,)}, {"y": (2,)}))
    ones = np.ones(2, "f")
    with hybridc.load(tmp_path / "b.hyb") as loaded:
        np.testing.assert_array_equal(loaded(self=ones, file=ones)["y"], [2, 2])


def test_closed_model(bundle):
    loaded = hybridc.load(bundle)
    loaded.close()
    loaded.close()
    with pytest.raises(UsageError, match="was closed"):
        loaded(x=VALUES)


def test_description(model):
    assert [(spec.name, spec.dtype, spec.shape) for spec in model.inputs] == [
        ("x", "float32", SHAPE)
    ]
    assert [spec.name for spec in model.outputs] == ["y"]
    assert set(model.plan) == {"llvm:0"}
    assert {"stem", "left", "right", "head"} <= set(model.plan["llvm:0"])
