"""The opencl target on PoCL: results, refusals, and parts on several devices."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hybridc.targets.gpu.lower import unfit_types
from hybridc.targets.opencl.build import compiled_graph, executable_for
from hybridc.targets.opencl.devices import parse_devices
from tvm import te

import hybridc
from hybridc.bundle.read import open_bundle
from hybridc.errors import UnsupportedError, UsageError
from hybridc.runtime.arrays import random_inputs
from hybridc.runtime.opencl import OpenclError, devices
from tests.conformance.suite import cases, difference
from tests.gpu.emulation import divergent_barriers, lowered_model
from tests.gpu.models import SMALL, coarse_light_model
from tests.models import make_model, node, random, run_reference
from tests.support import compile_to
from tests.targets.attention_case import Case
from tests.targets.test_gpu_schedules import feeds_of


def device_is_here():
    try:
        return bool(devices())
    except OpenclError:
        return False


needs_device = pytest.mark.skipif(not device_is_here(), reason="no OpenCL device is here")


def worst_error(results, expected):
    """Largest difference relative to the largest element of its output."""
    assert set(results) == set(expected)
    errors = []
    for name, right in expected.items():
        assert results[name].shape == right.shape
        assert results[name].dtype == right.dtype
        scale = max(float(np.abs(right).max(initial=0)), 1e-30)
        errors.append(float(np.abs(results[name] - right).max(initial=0)) / scale)
    return max(errors)


def opencl_source(name):
    """The OpenCL C of a small model's kernels."""
    device = parse_devices("")
    module = compiled_graph(lowered_model(SMALL[name]())[0].module, device)
    return "\n".join(sources(executable_for(module, device).mod))


def sources(module):
    """The OpenCL C in a module and in what it imports."""
    if module.kind == "opencl":
        yield module.inspect_source("cl")
    for imported in module.imports:
        yield from sources(imported)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", ("opencl_1.2",)),
        ("gpu", ("opencl_1.2", "device=gpu")),
        ("nvidia,fp16", ("opencl_1.2", "cl_khr_fp16", "device=nvidia")),
        ("fp16,fp64+aarch64", ("opencl_1.2", "cl_khr_fp64", "cl_khr_fp16")),
    ],
)
def test_specifications(text, code):
    parsed = parse_devices(text)
    assert parsed.device_code == code
    assert ("float64" in parsed.limits.types) is ("fp64" in text)
    assert (parsed.host.architecture == "aarch64") is ("aarch64" in text)


@pytest.mark.parametrize("text", ["gpu,cpu", "gpu+vax"])
def test_specifications_that_are_refused(text):
    with pytest.raises(UsageError):
        parse_devices(text)


@needs_device
@pytest.mark.parametrize("name", SMALL)
def test_small_models(name, tmp_path):
    """Among them the running sums that TVM's own kernels get wrong, and softmax with barriers."""
    model = SMALL[name]()
    compile_to(tmp_path / "b", model, targets=("opencl",))
    feeds = feeds_of(model)
    with hybridc.load(tmp_path / "b") as loaded:
        assert worst_error(loaded.run(feeds), run_reference(model, feeds)) <= 1e-4


FAMILIES = """
    test_and_bcast4v3d test_argmax_default_axis_random test_atan
    test_bitshift_left_uint8 test_bitwise_and_ui64_bcast_3v1d test_cast_FLOAT_to_FLOAT8E4M3FN
    test_clip_default_int8_inbounds test_compress_0 test_constant_pad
    test_constantofshape_float_ones test_hannwindow
    test_resize_downsample_sizes_linear_antialias
    test_convinteger_with_padding test_convtranspose_dilations
    test_depthtospace_crd_mode_example test_dequantizelinear_axis test_div_int32_trunc
    test_matmul_3d test_equal_bcast test_gather_elements_negative_indices
    test_gathernd_example_int32_batch_dim1 test_gelu_default_1 test_globalmaxpool
    test_greater_equal_bcast  test_hardsigmoid test_if test_isnan
    test_layer_normalization_4d_axis1 test_loop11  test_matmulinteger
    test_maxpool_2d_dilations test_mod_float32_mixed_sign_fmod_0 test_mod_mixed_sign_int8
    test_mod_mixed_sign_int64 test_nonzero_example test_not_4d
    test_onehot_with_axis test_pow_bcast_array test_qlinearconv
    test_quantizelinear_axis test_reduce_l2_keep_dims_random
    test_reduce_prod_negative_axes_keepdims_random
    test_reversesequence_batch test_roialign_aligned_true test_round
    test_scatter_elements_with_duplicate_indices test_scatternd_add test_shape test_sign
    test_slice_neg_steps test_split_variable_parts_2d_opset18 test_tan test_tile
    test_top_k_smallest test_transpose_all_permutations_3 test_unique_sorted_without_axis
    test_where_example test_xor3d
""".split()
"""One or two tests of ONNX's for each family of operators."""


@needs_device
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_operators(name):
    from hybridc import onnx_backend

    case = cases()[name]
    compiled = onnx_backend.prepare(case.model, target="opencl", fallback=False)
    for inputs, outputs in case.data:
        for actual, expected in zip(compiled.run(inputs), outputs, strict=True):
            assert difference(actual, expected, case) is None


@needs_device
@pytest.mark.slow
def test_a_real_model(tmp_path):
    model = coarse_light_model("squeezenet")
    compile_to(tmp_path / "b", model, targets=("opencl",))
    with hybridc.load(tmp_path / "b") as loaded:
        feeds = random_inputs(loaded, 0)
        assert worst_error(loaded.run(feeds), run_reference(model, feeds)) <= 1e-3


def chain_model():
    """Two branches of nodes that each make a kernel of their own."""
    nodes = [
        node("MatMul", "x w", "a", "product"),
        node("Softmax", "a", "b", "softmax"),
        node("ReduceSum", "a", "c", "sum", keepdims=1),
        node("MatMul", "b x", "d", "second"),
        node("CumSum", "c axis", "e", "running"),
        node("Add", "d e", "y", "join"),
    ]
    weights = {"w": random(24, 24), "axis": np.array(1)}
    return make_model(nodes, {"x": (2, 24, 24)}, {"y": (2, 24, 24)}, weights, opset=13)


@needs_device
@pytest.mark.parametrize("seed", range(4))
def test_parts_on_the_cpu_and_on_opencl(seed, tmp_path):
    """Every kernel is pinned to one of two devices at random."""
    model = chain_model()
    names = ["product", "softmax", "sum", "second", "running"]
    places = np.random.default_rng(seed).choice(["llvm:0", "opencl:0"], len(names))
    wanted = {name: str(place) for name, place in zip(names, places, strict=True)}
    pins = tuple(f"{name}={place}" for name, place in wanted.items())
    compile_to(tmp_path / "b", model, targets=("llvm", "opencl"), pins=pins)
    feeds = feeds_of(model, seed)
    with hybridc.load(tmp_path / "b") as loaded:
        found = {name: place for place, nodes in loaded.plan.items() for name in nodes}
        assert {name: found[name] for name in names} == wanted
        assert len(set(wanted.values())) == 2
        assert worst_error(loaded.run(feeds), run_reference(model, feeds)) <= 1e-5


@pytest.mark.parametrize("name", ["softmax", "layer-norm", "cumsum", "matmul", "topk", "attention"])
def test_every_work_item_comes_by_every_barrier(name):
    source = opencl_source(name)
    assert "__kernel void" in source
    as_cuda = source.replace("barrier(CLK_LOCAL_MEM_FENCE)", "__syncthreads()")
    assert "__syncthreads" in as_cuda
    assert list(divergent_barriers(as_cuda.replace("get_local_id", "threadIdx"))) == []


def test_a_barrier_in_a_branch_would_be_found():
    source = "if (get_local_id(0) < 3) {\n  barrier(CLK_LOCAL_MEM_FENCE);\n}\n"
    as_cuda = source.replace("barrier(CLK_LOCAL_MEM_FENCE)", "__syncthreads()")
    assert list(divergent_barriers(as_cuda.replace("get_local_id", "threadIdx")))


@pytest.mark.parametrize("name", ["softmax", "matmul", "conv-3x3", "branches"])
def test_kernels_stay_within_what_every_device_grants(name):
    source = opencl_source(name)
    sizes = re.findall(r"__local (\w+) \w+\[(\d+)\]", source)
    assert sum(int(size) * (8 if "long" in kind else 4) for kind, size in sizes) <= 32 * 1024
    assert "cl_khr" not in source
    assert "double" not in source


def test_each_kernel_is_declared_once():
    source = opencl_source("attention")
    names = re.findall(r"__kernel void (\w+)", source)
    assert len(names) == len(set(names)) > 3


def double_model(dtype="float64"):
    nodes = [node("Relu", "x", "h", "first"), node("Add", "h h", "y", "second")]
    return make_model(nodes, {"x": (3, 5)}, {"y": (3, 5)}, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_types_that_not_every_device_has_are_refused(dtype, tmp_path):
    with pytest.raises(UnsupportedError, match=f"it computes with {dtype}") as caught:
        compile_to(tmp_path / "b", double_model(dtype), targets=("opencl",), fallback=False)
    assert "first" in str(caught.value)


@needs_device
def test_types_that_are_refused_go_to_another_device(tmp_path):
    compile_to(tmp_path / "b", double_model(), targets=("opencl", "llvm"), fallback=False)
    with hybridc.load(tmp_path / "b") as loaded:
        assert set(loaded.plan) == {"llvm:0"}


@needs_device
@pytest.mark.skipif(
    not device_is_here() or "cl_khr_fp64" not in devices()[0].extensions, reason="no fp64 here"
)
def test_types_that_the_device_is_said_to_have(tmp_path):
    model = double_model()
    compile_to(tmp_path / "b", model, targets=("opencl:fp64",), fallback=False)
    (device,) = open_bundle(tmp_path / "b").manifest.devices
    assert "cl_khr_fp64" in device.device_code
    feeds = {"x": random(3, 5, dtype="float64")}
    with hybridc.load(tmp_path / "b") as loaded:
        assert worst_error(loaded.run(feeds), run_reference(model, feeds)) <= 1e-15


def test_a_kernel_too_large_for_drivers_is_refused():
    """A cubic resize by scales that are not known unrolls all taps of all axes."""
    model = cases()["test_resize_upsample_scales_cubic"].model
    device = parse_devices("")
    module = compiled_graph(lowered_model(model)[0].module, device)
    with pytest.raises(UnsupportedError, match="too many for drivers"):
        executable_for(module, device)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int64", "float8_e4m3fn"])
def test_a_type_inside_of_a_kernel_is_seen(dtype):
    x = te.placeholder((8,), name="x")
    y = te.compute((8,), lambda i: (x[i].astype(dtype) + x[i].astype(dtype)).astype("float32"))
    reason = unfit_types(te.create_prim_func([x, y]), parse_devices("").limits)
    assert reason is None if dtype == "int64" else dtype in reason


@needs_device
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 33, 70, 24, 40),
        Case(1, 2, 128, 128, 64, 64, mask=(1, 1, 1, 128)),
        Case(1, 2, 17, 41, 9, 33, mask=(1, 1, 17, 41)),
    ],
)
def test_attention_in_one_kernel(case, tmp_path):
    model, feeds = case.model("float32"), case.feeds()
    source = compiled_graph(lowered_model(model)[0].module, parse_devices(""))
    assert any(variable.name_hint.startswith("attention") for variable in source.functions)
    compile_to(tmp_path / "b", model, targets=("opencl",), fallback=False)
    with hybridc.load(tmp_path / "b") as loaded:
        (result,) = loaded.run(feeds).values()
    expected = case.expected(feeds)
    assert np.abs(result - expected).max() < 1e-5 * np.abs(expected).max()


def padded_model(batch, mode):
    """A pad between two reshapes, which are kernels of one function."""
    weights = {"s": [0, 171, 1], "p": [0, 128, 0, 0, 128, 0], "t": [0, 1, 1, 427]}
    nodes = [
        node("Reshape", "x s", "a", "flat"),
        node("Pad", "a p", "b", "pad", mode=mode),
        node("Reshape", "b t", "y", "back"),
    ]
    values = {name: np.array(value) for name, value in weights.items()}
    return make_model(nodes, {"x": (batch, 1, 1, 171)}, {"y": (batch, 1, 1, 427)}, values)


@needs_device
@pytest.mark.parametrize("mode", ["reflect", "wrap", "edge"])
@pytest.mark.parametrize("batch", [8, "n"])
def test_where_a_kernel_reads_depends_on_a_condition(batch, mode, tmp_path):
    """TVM made what such a kernel reads as large as its threads say, which are not known there."""
    model, feeds = padded_model(batch, mode), {"x": random(8, 1, 1, 171)}
    shapes = ("n=1..8",) if batch == "n" else ()
    compile_to(tmp_path / "b", model, targets=("opencl",), shapes=shapes)
    with hybridc.load(tmp_path / "b") as compiled:
        assert worst_error(compiled.run(feeds), run_reference(model, feeds)) == 0
